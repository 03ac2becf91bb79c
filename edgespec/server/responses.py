"""`/v1/responses`: OpenAI's newer protocol, without stored state. Requests become those of `chat`, which checks."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import asdict

from edgespec.chat.messages import part_text
from edgespec.server.answer import Answer, AnswerPart, Event, Exchange, Work, events, sse, usage
from edgespec.server.chat import RUNS_NONE, VERBOSITY, ChatRequest, effort_of, prepare, run_by_client
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.options import (
    DRAFT_MODEL,
    WITHOUT_EFFECT,
    JsonSchema,
    ResponseFormat,
    Sampled,
    Speculative,
    StreamOptions,
    Tokens,
    Tools,
)
from edgespec.server.requests import Asked, Fields, sent_as
from edgespec.server.service import Loaded

# What the client calls the fields of the chat request that its own one becomes.
_SENT_AS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
_REASONED = "reasoning_content"  # as chat templates call it
_STATELESS = "this server stores no responses: send the whole conversation as input"


class TextFormat(Fields):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: Annotated[str, Meta(max_length=64)] | None = None
    description: Any = None
    strict: bool | None = None


class TextOptions(Fields):
    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningOptions(Fields):
    """Summaries are left out: answers hold the reasoning itself."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponseRequest(Sampled, kw_only=True):
    """A request to `/v1/responses`."""

    ignored: ClassVar[frozenset[str]] = (WITHOUT_EFFECT | {"client_metadata"}) - {"metadata"}
    noted: ClassVar[Asked] = {
        **DRAFT_MODEL,
        "include": ("answers hold nothing further", ([], ["reasoning.encrypted_content"])),
        "truncation": ("a conversation that does not fit is refused, never cut", ("disabled",)),
    }
    refused: ClassVar[Asked] = {
        "previous_response_id": (_STATELESS, ()),
        "conversation": (_STATELESS, ()),
        "background": (_STATELESS, (False,)),
        "prompt": ("this server stores no prompts", ()),
        "top_logprobs": ("use /v1/chat/completions for log probabilities", (0,)),
        "max_tool_calls": (RUNS_NONE, ()),
    }
    input: str | Annotated[list[Any], Meta(max_length=4096)]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    speculative: bool | Speculative | None = None
    max_output_tokens: Tokens | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Any = None
    stream_options: StreamOptions | None = None


def answer_responses(loaded: Loaded, request: ResponseRequest, notes: list[str]) -> ResponsesExchange:
    """Answer a conversation (OpenAI's newer protocol, stateless)."""
    text, form = request.text or TextOptions(), None
    if text.verbosity is not None:
        why, neutral = VERBOSITY["verbosity"]
        notes += [f"text.verbosity: {why}"] if text.verbosity not in neutral else []
    if text.format is not None:
        schema = None if text.format.schema is None else JsonSchema(schema=text.format.schema, name=text.format.name)
        form = ResponseFormat(type=text.format.type, json_schema=schema)
    first = [{"role": "system", "content": request.instructions}] if request.instructions else []
    reasoning = request.reasoning or ReasoningOptions()
    effort = effort_of(loaded, "reasoning.effort", reasoning.effort, notes)
    said = [] if not isinstance(request.input, str) else [{"role": "user", "content": request.input}]
    for index, item in enumerate(request.input if isinstance(request.input, list) else ()):
        _add_item(said, item, f"input.{index}")
    choice = request.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat = ChatRequest(
        **{name: getattr(request, name) for name in (*Sampled.__struct_fields__, "speculative")},
        messages=first + [{"content": "", **message} for message in said],
        max_completion_tokens=request.max_output_tokens,
        tools=_functions(request.tools, notes),
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=form,
        reasoning_effort=effort,
    )
    described = asdict(text.format or TextFormat(type="text"))
    echoed = {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tools": request.tools or [],
        "tool_choice": request.tool_choice or "auto",
        "text": {"format": {name: value for name, value in described.items() if value is not None}},
        "reasoning": {"effort": effort, "summary": None},
        "metadata": request.metadata if isinstance(request.metadata, dict) else {},
    }
    with sent_as(_SENT_AS):
        return ResponsesExchange(prepare(loaded, chat, notes), echoed, is_stream=bool(request.stream))


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Append an item; calls of one turn join the assistant's message before them, as chat templates expect."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    begun = messages[-1] if messages and _REASONED in messages[-1] and "content" not in messages[-1] else None
    if kind == "message" and begun is not None and item.get("role") == "assistant":
        begun["content"] = item.get("content")
    elif kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary")
        text = "".join(part_text(part) or "" for part in parts) if isinstance(parts, list) else parts
        messages += [{"role": "assistant", _REASONED: text}] if text else []  # empty: OpenAI's, which is encrypted
    elif isinstance(kind, str) and kind.endswith("_call"):  # or one of another server's tools, such as a local shell
        given = item.get("arguments", item.get("action"))
        arguments = {"input": item.get("input")} if kind == "custom_tool_call" else given
        function = {"name": item.get("name") or kind.removesuffix("_call"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif isinstance(kind, str) and kind.endswith("_call_output"):
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    else:
        raise bad_request(f"{where} must be a message, a reasoning, a call such as function_call, or its output", where)


def _functions(tools: Sequence[Any] | None, notes: list[str]) -> list[dict[str, Any]]:
    """The tools as chat completions nest them. Raises HttpError 400 for kinds that a client runs and no model knows."""
    found = []
    for where, tool, kind in run_by_client(tools, notes):
        if kind != "function":
            reason = f"{where}: only tools of type function are supported"
            raise bad_request(reason, where, "unsupported_parameter")
        names = ("name", "description", "parameters", "strict")
        found.append({"type": "function", "function": {name: tool[name] for name in names if name in tool}})
    return found


class ResponsesExchange(Exchange):
    """A request to `/v1/responses`. `echoed`: what the answer repeats."""

    begins = "resp_"

    def __init__(self, work: Work, echoed: dict[str, Any], *, is_stream: bool) -> None:
        super().__init__(work, is_stream=is_stream)
        self._echoed = echoed
        self._sequence = 0

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return self._ended(answer, [self._item(part, _status(answer, part)) for part in answer.shown_parts])

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        (answer,) = answers
        output: list[dict[str, Any]] = []
        begun = self._object("in_progress", [])
        async for event in events(answer):
            if not self._sequence:
                yield self._event("response.created", response=begun)
                yield self._event("response.in_progress", response=begun)
            for written in self._written(event, answer, output):
                yield written
        yield self._event(f"response.{_status(answer)}", response=self._ended(answer, output))

    def _written(self, event: Event, answer: Answer, output: list[dict[str, Any]]) -> Iterator[bytes]:
        """What is sent for one event. An item is the last of `output` from its beginning on."""
        part, at = event.part, {"output_index": len(output) - (event.what != "begins")}
        kind = "output_text" if part.kind == "text" else "reasoning_text"
        kind = kind if part.call is None else "function_call_arguments"
        if event.what == "begins":
            begun: dict[str, Any] = {"content": []} if part.call is None else {"arguments": ""}
            output.append(self._item(part, "in_progress") | begun)
            yield self._event("response.output_item.added", item=output[-1], **at)
        place: dict[str, Any] = at | {"item_id": output[-1]["id"]}
        place |= {"content_index": 0} if part.call is None else {}
        extra: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        if event.what == "begins" and part.call is None:
            yield self._event("response.content_part.added", part=_content(AnswerPart(part.kind)), **place)
        elif event.what == "grows":
            yield self._event(f"response.{kind}.delta", delta=event.text, **extra, **place)
        elif event.what == "ends" and part.call is not None:
            name, arguments = part.call.name, part.call.arguments
            output[-1] |= {"status": "completed", "arguments": arguments}
            yield self._event(f"response.{kind}.done", name=name, arguments=arguments, **place)
        elif event.what == "ends":
            output[-1] |= {"status": _status(answer, part), "content": [_content(part)]}
            yield self._event(f"response.{kind}.done", text=part.text, **extra, **place)
            yield self._event("response.content_part.done", part=_content(part), **place)
        if event.what == "ends":
            yield self._event("response.output_item.done", item=output[-1], **at)

    def failure(self, error: HttpError) -> bytes:
        told = self._event("error", **_error(error))
        if self._sequence == 1:
            return told
        # Clients read until the response that has begun ends, and take the reason from there.
        reason = {name: value for name, value in _error(error).items() if name != "param"}
        return told + self._event("response.failed", response=self._object("failed", []) | {"error": reason})

    @classmethod
    def failed_early(cls, error: HttpError) -> bytes:
        return sse({"type": "error", "sequence_number": 0, **_error(error)}, "error")

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return sse({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)

    def _item(self, part: AnswerPart, status: str) -> dict[str, Any]:
        number = secrets.token_hex(12)
        if part.kind == "reasoning":
            head: dict[str, Any] = {"id": f"rs_{number}", "type": "reasoning", "summary": []}
            return head | {"content": [_content(part)], "status": status}
        if part.kind == "text":
            head = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
            return head | {"status": status, "content": [_content(part)]}
        call = part.call
        assert call is not None
        head = {"id": f"fc_{number}", "type": "function_call", "call_id": call.id, "name": call.name}
        return head | {"arguments": call.arguments, "status": status}

    def _ended(self, answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
        counts = usage([answer])
        details = {"reason": "max_output_tokens"} if _status(answer) == "incomplete" else None
        return self._object(_status(answer), output) | {
            "incomplete_details": details,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
                "total_tokens": counts["total_tokens"],
            },
            "timings": answer.timings,
            "seed": answer.seed,
        }

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        sampling = self.jobs[0].sampling
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.name,
            "output": output,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
        } | self._echoed


def _content(part: AnswerPart) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _status(answer: Answer, part: AnswerPart | None = None) -> str:
    """Of the answer, or of a part: one that something followed is complete, and so is a call."""
    is_last = part is None or part.is_last
    return "incomplete" if is_last and answer.finish_reason == "length" else "completed"


def _error(error: HttpError) -> dict[str, Any]:
    return {"code": error.code or error.kind, "message": error.message, "param": error.param}

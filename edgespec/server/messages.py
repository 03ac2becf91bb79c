"""`/v1/messages`: Anthropic's protocol. Requests become those of `chat`, which checks them.

Claude Code and other agents send fields for Anthropic's servers, such as the management of the context: those that
cannot change the text are accepted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from edgespec.chat.messages import part_text
from edgespec.server.answer import Answer, AnswerPart, Event, Exchange, events, sse
from edgespec.server.chat import RUNS_NONE, TEXT_ONLY, ChatRequest, effort_of, prepare, run_by_client
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.options import JsonSchema, Positive, ResponseFormat, Sampled, Speculative, StopList, Tools
from edgespec.server.requests import Asked, Fields, sent_as
from edgespec.server.service import Loaded

PATH = "/v1/messages"
_SENT_AS = {
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
    "response_format.json_schema": "output_config.format",
}
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class ToolChoice(Fields):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """A budget limits nothing: the answer has `max_tokens` for both."""

    type: Literal["enabled", "adaptive", "disabled"] | None = None


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Fields):
    format: OutputFormat | None = None
    effort: Any = None


class CountRequest(Sampled, kw_only=True):
    """A request to `/v1/messages/count_tokens`, to which some send all of it. `output_format`: its former place."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "service_tier", "betas", "cache_control", "inference_geo", "speed")
    )
    noted: ClassVar[Asked] = {
        "context_management": ("the conversation is read as it is, nothing is cleared", ()),
        "container": (RUNS_NONE, ()),
    }
    refused: ClassVar[Asked] = {
        "mcp_servers": (RUNS_NONE, ([],)),
        "thread": ("no conversation is stored: send all of its messages", ()),
    }
    messages: Annotated[list[Any], Meta(max_length=4096)]
    model: str | None = None
    system: Any = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """A request to `/v1/messages`."""

    max_tokens: Positive
    stop_sequences: StopList | None = None
    stream: bool | None = None
    speculative: bool | Speculative | None = None


def answer_messages(loaded: Loaded, request: MessagesRequest, notes: list[str]) -> MessagesExchange:
    """Answer a conversation (Anthropic)."""
    chat = _as_chat(loaded, request, notes)
    chat.max_tokens, chat.stop, chat.speculative = request.max_tokens, request.stop_sequences, request.speculative
    with sent_as(_SENT_AS):
        return MessagesExchange(prepare(loaded, chat, notes), is_stream=bool(request.stream))


def count_tokens(loaded: Loaded, request: CountRequest, notes: list[str]) -> dict[str, Any]:
    """Count a prompt's tokens (Anthropic)."""
    chat = _as_chat(loaded, request, notes)
    with sent_as(_SENT_AS):
        return {"input_tokens": len(prepare(loaded, chat, notes).jobs[0].prompt_ids)}


def _as_chat(loaded: Loaded, request: CountRequest, notes: list[str]) -> ChatRequest:
    """The chat request for an answer that is not written. Raises HttpError."""
    choice, form = request.tool_choice, request.output_format
    if request.output_config is not None:
        form = request.output_config.format or form
    sampling = {name: getattr(request, name) for name in Sampled.__struct_fields__}
    chat = ChatRequest(**sampling, messages=_read_conversation(request), tools=_read_tools(request.tools, notes))
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat.tool_choice = {"any": "required", "tool": named}.get(choice.type, choice.type)  # type: ignore[assignment]
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if form is not None:
        chat.response_format = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema))
    if request.thinking is not None:
        effort = "none" if request.thinking.type in (None, "disabled") else "medium"
        chat.reasoning_effort = effort_of(loaded, "thinking", effort, notes)
    return chat


def _read_conversation(request: CountRequest) -> list[dict[str, Any]]:
    """System text and messages as OpenAI's."""
    found: list[dict[str, Any]] = []
    if request.system is not None:
        found.append({"role": "system", "content": _system_text(request.system)})
    for index, message in enumerate(request.messages):
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise bad_request(f"messages.{index}.role must be user, assistant or system", "messages")
        found += _translated(message)
    return found


def _system_text(content: Any) -> str:
    """The system prompt without Claude Code's line for billing, which Anthropic's models do not see.

    It differs from request to request, so that nothing of the prompt behind it could be taken from the cache. Raises
    HttpError for what is no text.
    """
    if isinstance(content, str):
        return content
    texts = [part_text(block) for block in (content if isinstance(content, list) else [content])]
    if None in texts:
        raise bad_request(f"system must be a text or a list of text blocks: {TEXT_ONLY}", "system")
    return "".join(text for text in texts if text and not text.startswith("x-anthropic-billing-header:"))


def _translated(message: dict[str, Any]) -> list[dict[str, Any]]:
    """One message as those that OpenAI makes of it: tool results are messages of their own there."""
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results, calls, texts = list[dict[str, Any]](), list[dict[str, Any]](), list[Any]()
    thoughts = list[str]()
    blocks: list[Any] = content if isinstance(content, list) else [content] if role == "user" or content else []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            thoughts += [block["thinking"]] if isinstance(block.get("thinking"), str) else []
        elif kind == "tool_result" and role == "user":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        else:
            texts.append(block)
    found = results
    if texts or calls or thoughts:
        own: dict[str, Any] = {"role": role, "content": texts}
        own |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        found.append(own | ({"tool_calls": calls} if calls else {}))
    return found


def _read_tools(tools: Sequence[Any] | None, notes: list[str]) -> list[dict[str, Any]]:
    """The tools as OpenAI nests them, without those that Anthropic's servers run themselves."""
    found = []
    for where, tool, _ in run_by_client(tools, notes):
        if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
            raise bad_request(f"{where} must have name and input_schema", where)
        described = {"name": tool.get("name"), "description": tool.get("description") or ""}
        found.append({"type": "function", "function": described | {"parameters": tool["input_schema"]}})
    return found


class MessagesExchange(Exchange):
    begins = "msg_"
    ping = sse({"type": "ping"}, "ping")

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        message = self._message([_block(part) for part in answer.shown_parts], _counts(answer, answer.stats.new_tokens))
        return message | self._end(answer) | {"seed": answer.seed}

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        (answer,) = answers
        index = -1
        async for event in events(answer):
            if index < 0:
                begun = {"stop_reason": None, "stop_sequence": None}
                yield _event("message_start", message=self._message([], _counts(answer, 0)) | begun)
            index += event.what == "begins"
            for written in _written(event, index):
                yield written
        counts = _counts(answer, answer.stats.new_tokens)
        yield _event("message_delta", delta=self._end(answer), usage=counts, seed=answer.seed)
        yield _event("message_stop")

    @classmethod
    def failed_early(cls, error: HttpError) -> bytes:
        return sse(error.body(PATH), "error")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.name}
        return head | {"content": content, "usage": usage}

    def _end(self, answer: Answer) -> dict[str, Any]:
        matched = answer.matched_stop(self.jobs[0].options.stop)
        reason = "stop_sequence" if matched is not None else _STOP_REASONS[answer.finish_reason]
        return {"stop_reason": reason, "stop_sequence": matched}


def _counts(answer: Answer, num_new: int) -> dict[str, int]:
    """Anthropic counts cached tokens apart."""
    stats = answer.stats
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": stats.reused_tokens}
    return {"input_tokens": stats.prompt_tokens - stats.reused_tokens, **cached, "output_tokens": num_new}


def _written(event: Event, index: int) -> Iterator[bytes]:
    """What is sent for one event of block `index`."""

    def delta(**given: str) -> bytes:
        return _event("content_block_delta", index=index, delta=given)

    part, kind = event.part, "thinking" if event.part.kind == "reasoning" else "text"
    if event.what == "begins":
        block = _block(AnswerPart(part.kind, call=part.call)) | ({} if part.call is None else {"input": {}})
        yield _event("content_block_start", index=index, content_block=block)
    elif event.what == "grows" and part.call is not None:
        yield delta(type="input_json_delta", partial_json=event.text)
    elif event.what == "grows":
        yield delta(type=f"{kind}_delta", **{kind: event.text})
    else:
        if kind == "thinking":
            yield delta(type="signature_delta", signature="")
        yield _event("content_block_stop", index=index)


def _block(part: AnswerPart) -> dict[str, Any]:
    if part.call is not None:
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": part.call.input}
    if part.kind == "reasoning":  # Anthropic signs it so that it comes back unchanged; there is no such check here
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)

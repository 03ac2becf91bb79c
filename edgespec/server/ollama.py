"""A part of Ollama's API: `/api/chat`, `/api/generate` and what programs ask before them. Requests are translated to
those of `chat_request` and `completions`, which check them; answers are lines of JSON.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

from edgespec import __version__
from edgespec.chat.marks import reasoning_marks
from edgespec.chat.tool_forms import tool_parser
from edgespec.server.answer import Answer
from edgespec.server.call_grammar import ANY_OBJECT
from edgespec.server.chat_request import read_chat
from edgespec.server.completions import read_completion
from edgespec.server.exchange import Exchange, compact
from edgespec.server.fields import Fields
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.options import require_model
from edgespec.server.scheduler import Ticket
from edgespec.server.service import Loaded, Service

_TAG = ":latest"
_EFFORTS = ("low", "medium", "high")
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n"),
)
_WITHOUT_EFFECT = ("num_batch", "num_gpu", "num_thread", "main_gpu", "use_mmap", "numa", "num_keep")


class OllamaExchange(Exchange):
    """A request to `/api/chat` or, with `is_chat` false, to `/api/generate`."""

    media_type = "application/x-ndjson"

    def __init__(self, loaded: Loaded, inner: Exchange, *, is_chat: bool, is_stream: bool) -> None:
        super().__init__(inner.jobs, is_stream=is_stream)
        self._name, self._inner, self._is_chat = loaded.name, inner, is_chat

    def answer(self, ticket: Ticket) -> Answer:
        return self._inner.answer(ticket)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return self._part(answer.text, _calls(answer.calls), answer.reasoning) | _end(answer)

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        (answer,) = answers
        async for piece in answer.pieces():
            if piece.reasoning:
                yield _line(self._part("", [], piece.reasoning) | {"done": False})
            if piece.text or piece.calls:
                yield _line(self._part(piece.text, _calls(piece.calls)) | {"done": False})
        yield _line(self._part("", []) | _end(answer))

    def failure(self, error: HttpError) -> bytes:
        return _line(error.body("/api/"))

    def _part(self, text: str, calls: list[dict[str, Any]], reasoning: str = "") -> dict[str, Any]:
        head, thinking = {"model": self._name, "created_at": _now()}, {"thinking": reasoning} if reasoning else {}
        if not self._is_chat:
            return head | {"response": text} | thinking
        message = {"role": "assistant", "content": text} | thinking | ({"tool_calls": calls} if calls else {})
        return head | {"message": message}


class Preload(Exchange):
    """A request without a text, with which clients load a model before they need it; `ollama run` begins so."""

    def __init__(self, loaded: Loaded, *, is_chat: bool) -> None:
        super().__init__((), is_stream=False)
        text: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        self._body = {"model": loaded.name, "created_at": _now()} | text | {"done": True, "done_reason": "load"}

    def answer(self, ticket: Ticket) -> Answer:
        raise AssertionError("a request without jobs has no answers")

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._body

    def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        raise AssertionError("it is one line")


def _calls(calls: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in calls]


def _end(answer: Answer) -> dict[str, Any]:
    """Counts, and durations in nanoseconds."""
    stats = answer.stats
    return {
        "done": True,
        "done_reason": "length" if answer.finish_reason == "length" else "stop",
        "total_duration": int(stats.wall_s * 1e9),
        "load_duration": 0,
        "prompt_eval_count": stats.prompt_tokens,
        "prompt_eval_duration": int(stats.prefill_s * 1e9),
        "eval_count": stats.new_tokens,
        "eval_duration": int(max(stats.decode_s, 0.0) * 1e9),
    }


def _line(value: Any) -> bytes:
    return compact(value).encode() + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def read_chat_request(loaded: Loaded, fields: Fields) -> Exchange:
    """`/api/chat`. Blocks while it encodes. Raises HttpError and EdgespecError."""
    is_stream, body = _read_common(loaded, fields)
    messages = fields.listed("messages", 4096)
    body |= {"messages": messages, "tools": fields.given("tools")}
    if any(isinstance(message, dict) and message.get("images") for message in messages or ()):
        raise bad_request("images are not supported: this server reads text only", "messages")
    fields.finish()
    if messages == []:
        return Preload(loaded, is_chat=True)
    body["messages"] = None if messages is None else [_with_reasoning(message) for message in messages]
    return OllamaExchange(loaded, read_chat(loaded, Fields(body)), is_chat=True, is_stream=is_stream)


def _with_reasoning(message: Any) -> Any:
    """A message whose `thinking` chat templates find under the name that they know."""
    thinking = message.get("thinking") if isinstance(message, dict) else None
    return {**message, "reasoning_content": thinking} if isinstance(thinking, str) and thinking else message


def read_generate_request(loaded: Loaded, fields: Fields) -> Exchange:
    """`/api/generate`: the prompt as a chat of one message, with `raw` as it is, with `suffix` as a gap's beginning."""
    is_stream, body = _read_common(loaded, fields)
    prompt, system = fields.text("prompt"), fields.text("system")
    is_raw = fields.flag("raw")
    suffix = fields.text("suffix")
    for name in ("images", "context", "template"):
        fields.refuse(name, "this server has no such feature", ("", []))
    if suffix:
        fields.refuse("system", "a gap between two texts is filled without one", ("",))
    fields.finish()
    if not prompt and not suffix:
        return Preload(loaded, is_chat=False)
    if is_raw or suffix:
        inner: Exchange = read_completion(loaded, Fields(body | {"prompt": prompt or "", "suffix": suffix}))
    else:
        first = [{"role": "system", "content": system}] if system else []
        inner = read_chat(loaded, Fields(body | {"messages": [*first, {"role": "user", "content": prompt}]}))
    return OllamaExchange(loaded, inner, is_chat=False, is_stream=is_stream)


def _read_common(loaded: Loaded, fields: Fields) -> tuple[bool, dict[str, Any]]:
    """Whether to stream, which is Ollama's default, and the options under OpenAI's names."""
    _require(loaded, fields)
    fields.ignore("keep_alive")
    body = _effort(loaded, fields)
    body |= {"speculative": fields.given("speculative"), "json_schema": _format(fields)}
    options = fields.fields("options")
    if options is not None:
        body |= {name: options.given(name) for name in _SAMPLING}
        limit = options.whole("num_predict", -2, 2**31 - 1)
        if limit == 0:
            raise options.wrong("num_predict", "must be at least 1, or -1 for no limit", limit)
        body["max_tokens"] = None if limit is None or limit < 0 else limit
        context = options.whole("num_ctx", 1, 2**31 - 1)
        if context is not None and context > loaded.model.context_length:
            raise bad_request(
                f"options.num_ctx is over the server's --ctx-size, {loaded.model.context_length}", "options"
            )
        options.ignore(*_WITHOUT_EFFECT)
        options.finish()
    return fields.flag("stream", True), body


def _effort(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """`think`, a switch or an effort, as `reasoning_effort`."""
    template = loaded.model.target.vocabulary.chat_template or ""
    if reasoning_marks(template) is None and "enable_thinking" not in template and "reasoning_effort" not in template:
        fields.refuse("think", "this model does not reason before it answers", (False,))
        return {}
    think = fields.given("think")
    if think not in (None, True, False, *_EFFORTS):
        raise fields.wrong("think", f"must be true, false or one of {', '.join(_EFFORTS)}", think)
    if think is None or fields.given("raw") or fields.given("suffix"):
        return {}
    return {"reasoning_effort": {True: "medium", False: "none"}.get(think, think)}


def _format(fields: Fields) -> dict[str, Any] | None:
    """`format`, "json" or a schema, as a schema."""
    form = fields.given("format")
    if form in (None, ""):
        return None
    if form == "json":
        return ANY_OBJECT
    if not isinstance(form, dict):
        raise fields.wrong("format", "must be json or a JSON schema", form)
    return form


def _require(loaded: Loaded, fields: Fields) -> None:
    name = fields.text("model")
    is_served = name is not None and name.removesuffix(_TAG) == loaded.name.removesuffix(_TAG)
    require_model(loaded, Fields({"model": loaded.name if is_served else name}))


# -- what programs ask first


def version() -> dict[str, Any]:
    """`/api/version`."""
    return {"version": __version__}


def listed(service: Service) -> dict[str, Any]:
    """`/api/tags` and `/api/ps`: the served model, once it is loaded."""
    if service.loaded is None:
        return {"models": []}
    facts = service.loaded.model.target.facts
    modified = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    known = {"name": service.name, "model": service.name, "modified_at": modified, "size": facts.weight_bytes}
    return {"models": [known | {"digest": "", "details": _details(service.loaded)}]}


def show(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """`/api/show`."""
    _require(loaded, fields)
    fields.ignore("verbose")
    fields.finish()
    template = loaded.model.target.vocabulary.chat_template
    return {
        "template": template or "",
        "details": _details(loaded),
        "model_info": {"general.architecture": "edgespec", "edgespec.context_length": loaded.model.context_length},
        "capabilities": [
            "completion",
            *(["tools"] if tool_parser(template) else []),
            *(["thinking"] if reasoning_marks(template) else []),
            *(["insert"] if loaded.model.target.vocabulary.fim else []),
        ],
    }


def _details(loaded: Loaded) -> dict[str, Any]:
    form = "gguf" if loaded.model.target.facts.name == "llamacpp" else "onnx"
    return {"format": form, "family": "", "families": [], "parameter_size": "", "quantization_level": ""}

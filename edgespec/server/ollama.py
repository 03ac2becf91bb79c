"""A part of Ollama's API: `/api/chat` and `/api/generate`. Requests are translated to those of `chat_request` and
`completions`, which check them; answers are lines of JSON.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

from edgespec.chat.marks import reasoning_marks
from edgespec.reports import TokenEvent
from edgespec.server.answer import Answer, logprobs_of
from edgespec.server.chat_request import MOST_TOP_LOGPROBS, read_chat
from edgespec.server.completions import read_completion
from edgespec.server.exchange import Exchange, compact
from edgespec.server.facts import require_served
from edgespec.server.fields import Fields
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.keep_alive import read_keep_alive
from edgespec.server.llamacpp_fields import OLLAMA, read_unbuilt
from edgespec.server.options import MOST_TOKENS, SAMPLING
from edgespec.server.scheduler import Ticket
from edgespec.server.service import Loaded, Names
from edgespec.server.structure import ANY_OBJECT

_EFFORTS = ("low", "medium", "high")
_OPTIONS = (*SAMPLING, "stop")
_SENT_AS = {name: f"options.{name}" for name in _OPTIONS} | {
    "max_tokens": "options.num_predict",
    "json_schema": "format",
    "reasoning_effort": "think",
}


class OllamaExchange(Exchange):
    """A request to `/api/chat` or, with `is_chat` false, to `/api/generate`."""

    media_type = "application/x-ndjson"
    ping = b""  # its clients parse every line
    streams_by_default = True

    def __init__(
        self, loaded: Loaded, inner: Exchange, keep_loaded_s: float | None, *, is_chat: bool, is_stream: bool
    ) -> None:
        super().__init__(inner.jobs, is_stream=is_stream)
        self.keep_loaded_s = keep_loaded_s
        self._name, self._inner, self._is_chat = loaded.name, inner, is_chat
        self._vocabulary = loaded.model.target.vocabulary

    def answer(self, ticket: Ticket) -> Answer:
        return self._inner.answer(ticket)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        tokens = [*answer.reasoning_tokens, *answer.tokens]
        return self._part(answer.text, _calls(answer.calls), answer.reasoning, tokens) | _end(answer)

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        (answer,) = answers
        async for piece in answer.pieces():
            if piece.reasoning or piece.reasoning_tokens:
                yield _line(self._part("", [], piece.reasoning, piece.reasoning_tokens) | {"done": False})
            if piece.text or piece.calls or piece.tokens:
                yield _line(self._part(piece.text, _calls(piece.calls), "", piece.tokens) | {"done": False})
        yield _line(self._part("", []) | _end(answer))

    @classmethod
    def failed_early(cls, error: HttpError) -> bytes:
        return _line(error.body("/api/"))

    def _part(
        self, text: str, calls: list[dict[str, Any]], reasoning: str = "", tokens: Sequence[TokenEvent] = ()
    ) -> dict[str, Any]:
        head: dict[str, Any] = {"model": self._name, "created_at": _now()}
        found = logprobs_of(self._vocabulary, tokens)
        for each in found if not self.jobs[0].options.top_logprobs else ():
            del each["top_logprobs"]  # Ollama leaves an empty list out
        head |= {"logprobs": found} if found else {}
        thinking = {"thinking": reasoning} if reasoning else {}
        if not self._is_chat:
            return head | {"response": text} | thinking
        message = {"role": "assistant", "content": text} | thinking | ({"tool_calls": calls} if calls else {})
        return head | {"message": message}


class Preload(Exchange):
    """A request without a text, with which clients load a model before they need it, as `ollama run` does, or with
    `keep_alive` 0 unload it, as `ollama stop` does.
    """

    def __init__(self, name: str, keep_loaded_s: float | None, *, is_chat: bool) -> None:
        super().__init__((), is_stream=False)
        self.keep_loaded_s = keep_loaded_s
        text: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        reason = "unload" if keep_loaded_s == 0 else "load"
        self._body = {"model": name, "created_at": _now()} | text | {"done": True, "done_reason": reason}

    def answer(self, ticket: Ticket) -> Answer:
        raise AssertionError("a request without jobs has no answers")

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._body

    def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        raise AssertionError("it is one line")


def _calls(calls: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"function": {"name": call.name, "arguments": call.input}} for call in calls]


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
        "seed": answer.ticket.seed,
    }


def _line(value: Any) -> bytes:
    return compact(value).encode() + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def read_chat_request(loaded: Loaded, fields: Fields) -> Exchange:
    """`/api/chat`. Blocks while it encodes. Raises HttpError and EdgespecError."""
    keep_s, is_stream, body = _read_common(loaded, fields)
    messages = fields.listed("messages", 4096)
    body |= {"messages": messages, "tools": fields.given("tools")}
    fields.finish()
    if messages == []:
        return Preload(loaded.name, keep_s, is_chat=True)
    body["messages"] = None if messages is None else [_as_openais(message) for message in messages]
    inner = read_chat(loaded, Fields(body, names=_SENT_AS, notes=fields.notes))
    _check_room(loaded, fields, inner)
    return OllamaExchange(loaded, inner, keep_s, is_chat=True, is_stream=is_stream)


def _as_openais(message: Any) -> Any:
    """A message whose `thinking` has the name that chat templates know, and whose `images` are parts of its content."""
    if not isinstance(message, dict):
        return message
    thinking, images = message.get("thinking"), message.get("images")
    found = {**message, "reasoning_content": thinking} if isinstance(thinking, str) and thinking else message
    parts = [{"type": "text", "text": message.get("content") or ""}, {"type": "image"}]
    return {**found, "content": parts} if images else found


def read_generate_request(loaded: Loaded, fields: Fields) -> Exchange:
    """`/api/generate`: the prompt as a chat of one message, with `raw` as it is, with `suffix` as a gap's beginning."""
    keep_s, is_stream, body = _read_common(loaded, fields)
    prompt, system = fields.text("prompt"), fields.text("system")
    is_raw = fields.flag("raw")
    suffix = fields.text("suffix")
    for name in ("images", "context", "template"):
        fields.refuse(name, "this server has no such feature", ("", []))
    if suffix:
        fields.refuse("system", "a gap between two texts is filled without one", ("",))
    fields.finish()
    if not prompt and not suffix:
        return Preload(loaded.name, keep_s, is_chat=False)
    if is_raw or suffix:
        num_top = body.pop("top_logprobs") or 0
        body |= {"prompt": prompt or "", "suffix": suffix, "logprobs": num_top if body["logprobs"] else None}
        names = _SENT_AS | {"logprobs": "top_logprobs"}
        inner: Exchange = read_completion(loaded, Fields(body, names=names, notes=fields.notes))
    else:
        first = [{"role": "system", "content": system}] if system else []
        messages = [*first, {"role": "user", "content": prompt}]
        inner = read_chat(loaded, Fields(body | {"messages": messages}, names=_SENT_AS, notes=fields.notes))
    _check_room(loaded, fields, inner)
    return OllamaExchange(loaded, inner, keep_s, is_chat=False, is_stream=is_stream)


def unload_at_rest(names: Names, fields: Fields, *, is_chat: bool) -> dict[str, Any] | None:
    """The answer to a request to unload the model while it is not loaded; None for one that needs it.

    Raises HttpError.
    """
    is_empty = fields.given("messages") == [] if is_chat else not (fields.given("prompt") or fields.given("suffix"))
    if not is_empty or read_keep_alive(fields) != 0:
        return None
    require_served(names, fields)
    return Preload(names.own, 0, is_chat=is_chat).whole(())


def _read_common(loaded: Loaded, fields: Fields) -> tuple[float | None, bool, dict[str, Any]]:
    """For how long to stay loaded; whether to stream, which is Ollama's default; the options under OpenAI's names."""
    require_served(loaded.names, fields)
    keep_s = read_keep_alive(fields)
    for name in ("truncate", "shift"):  # of what is too long: such a conversation is refused, a full context ends it
        fields.flag(name, True)
    body = _effort(loaded, fields)
    body |= _logprobs(fields)
    body |= {"speculative": fields.given("speculative"), "json_schema": _format(fields)}
    options = fields.fields("options")
    if options is not None:
        body |= {name: options.given(name) for name in _OPTIONS} | {"max_tokens": options.given("num_predict")}
        if body["max_tokens"] == 0:
            raise options.wrong("num_predict", "must be at least 1, or -1 for no limit", 0)
        context = options.whole("num_ctx", 1, MOST_TOKENS)
        if context is not None and context > loaded.model.context_length:  # many clients send 8192 with every request
            options.note("num_ctx", f"the context has {loaded.model.context_length} tokens, the server's --ctx-size")
        read_unbuilt(options, OLLAMA)
        options.finish()
    return keep_s, fields.flag("stream", True), body


def _check_room(loaded: Loaded, fields: Fields, inner: Exchange) -> None:
    """Refuse an answer that fits into the context that was asked for but not into the server's."""
    options, most = fields.given("options") or {}, loaded.model.context_length
    context, limit = options.get("num_ctx") or 0, options.get("num_predict") or 0
    num_prompt = len(inner.jobs[0].prompt_ids)
    if context > most and limit > 0 and num_prompt < most < num_prompt + limit:
        raise bad_request(
            f"the prompt has {num_prompt} tokens and num_predict is {limit}, but the context holds only {most}: "
            "ask for fewer or give the server a larger --ctx-size",
            "options.num_predict",
            "context_length_exceeded",
        )


def _logprobs(fields: Fields) -> dict[str, Any]:
    """`logprobs` and `top_logprobs`, which Ollama took from OpenAI's chat protocol."""
    is_wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MOST_TOP_LOGPROBS)
    if top and not is_wanted:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return {"logprobs": is_wanted, "top_logprobs": top}


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

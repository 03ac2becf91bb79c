"""A part of Ollama's API. Requests to `/api/chat` and `/api/generate` become those of `chat` and `completions`, which
check them; answers are lines of JSON.

`/api/pull` and `/api/delete` are about models of the user's own folder, and not those that this server serves. Both
need somebody who may use this machine's disk and network: a program on it, or one with the API key, and no web page but
the server's own.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from time import time
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from edgespec.chat.tools import ToolCall
from edgespec.errors import ConfigError, EdgespecError, ModelNotFound, StateError, shown
from edgespec.loading.catalogue import parse
from edgespec.loading.own_models import remove
from edgespec.loading.pull import pull
from edgespec.server import chat, completions
from edgespec.server.answer import Answer, Exchange, Work, compact
from edgespec.server.chat import can_reason
from edgespec.server.facts import written
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.options import Positive, Sampled, Speculative, Stops, Tokens, turned_off
from edgespec.server.requests import Asked, Fields, parse_object, read, sent_as, unsupported, wrong
from edgespec.server.service import Loaded, Services, without_tag
from edgespec.server.structure import ANY_OBJECT
from edgespec.server.web import STREAM_HEADERS, json_response, read_body

_OPTIONS = (*Sampled.__struct_fields__, "stop")
_SENT_AS = {
    **{name: f"options.{name}" for name in _OPTIONS},
    "max_tokens": "options.num_predict",
    "json_schema": "format",
    "reasoning_effort": "think",
}
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"-?(\d{1,12}(?:\.\d{1,12})?)([smh]?)", re.ASCII)
_SUCCESS = {"status": "success"}
_NO_LOGPROBS: tuple[str, tuple[Any, ...]] = ("use /v1/chat/completions", (False, 0))
_NO_FEATURE: tuple[str, tuple[Any, ...]] = ("this server has no such feature", ("", []))


class OllamaOptions(Sampled):
    refused: ClassVar[Asked] = turned_off(typical_p=(1,), tfs_z=(1,), mirostat=(0,), penalize_newline=(True,))
    stop: Stops | None = None
    num_predict: Tokens | None = None
    num_ctx: Positive | None = None


class OllamaRequest(Fields):
    """What both paths have. `truncate`, `shift`: a conversation that is too long is refused, a full context ends it."""

    refused: ClassVar[Asked] = {"logprobs": _NO_LOGPROBS, "top_logprobs": _NO_LOGPROBS}
    model: str | None = None
    stream: bool | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    speculative: bool | Speculative | None = None


class OllamaChat(OllamaRequest, kw_only=True):
    """A request to `/api/chat`. Without a message it only loads the model."""

    messages: Annotated[list[Any], Meta(max_length=4096)]
    tools: list[Any] | None = None


class OllamaGenerate(OllamaRequest):
    """A request to `/api/generate`. `suffix`: what follows the gap that is to be filled."""

    refused: ClassVar[Asked] = {
        **OllamaRequest.refused,
        **dict.fromkeys(("images", "context", "template"), _NO_FEATURE),
    }
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None


def answer_chat(loaded: Loaded, request: OllamaChat, notes: list[str]) -> Exchange | dict[str, Any]:
    """Answer a conversation (Ollama)."""
    messages = [_as_openais(message) for message in request.messages]

    def prepared(**asked: Any) -> Work:
        return chat.prepare(loaded, chat.ChatRequest(**asked, messages=messages, tools=request.tools), notes)

    return _answered(loaded, request, notes, prepared if messages else None, is_chat=True)


def answer_generate(loaded: Loaded, request: OllamaGenerate, notes: list[str]) -> Exchange | dict[str, Any]:
    """Answer a prompt (Ollama): a chat of one message, with `raw` as it is, with `suffix` the beginning of a gap."""
    prompt, is_text = request.prompt or "", bool(request.raw or request.suffix)
    if request.suffix and request.system:
        raise unsupported("system", "a gap between two texts is filled without one")

    def prepared(**asked: Any) -> Work:
        if is_text:
            asked.pop("reasoning_effort", None)
            text = completions.Completion(**asked, prompt=prompt, suffix=request.suffix)
            return completions.prepare(loaded, text)
        first = [{"role": "system", "content": request.system}] if request.system else []
        return chat.prepare(
            loaded, chat.ChatRequest(**asked, messages=[*first, {"role": "user", "content": prompt}]), notes
        )

    return _answered(loaded, request, notes, prepared if prompt or request.suffix else None, is_chat=False)


def _answered(
    loaded: Loaded, request: OllamaRequest, notes: list[str], prepared: Callable[..., Work] | None, *, is_chat: bool
) -> Exchange | dict[str, Any]:
    """`prepared`: makes the work of the options under OpenAI's names; None without a text, with which clients load a
    model before they need it, as `ollama run` does, or with `keep_alive` 0 unload it, as `ollama stop` does.
    """
    options, keep_s = read(OllamaOptions, request.options or {}, notes, "options"), read_keep_alive(request.keep_alive)
    length = loaded.model.context_length
    if options.num_ctx is not None and options.num_ctx > length:  # many clients send 8192 with every request
        notes.append(f"options.num_ctx: the context has {length} tokens, the server's --ctx-size")
    work = None
    if prepared is not None:
        asked = _asked(loaded, request, options)
        with sent_as(_SENT_AS):
            work = prepared(**asked)
    if keep_s is not None:
        loaded.service.keep_for(keep_s)
    if work is not None:
        return OllamaExchange(work, is_chat=is_chat, is_stream=request.stream is not False)
    text: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    done = {"done": True, "done_reason": "unload" if keep_s == 0 else "load"}
    return {"model": loaded.service.name, "created_at": written(time())} | text | done


def _asked(loaded: Loaded, request: OllamaRequest, options: OllamaOptions) -> dict[str, Any]:
    """The options under OpenAI's names. Raises HttpError."""
    form, think = request.format or None, request.think
    if isinstance(form, str) and form != "json":
        raise wrong("format", "must be json or a JSON schema", form)
    found = {name: getattr(options, name) for name in _OPTIONS} | {"max_tokens": options.num_predict}
    found |= {"speculative": request.speculative, "json_schema": ANY_OBJECT if form == "json" else form}
    if think and not can_reason(loaded):
        raise unsupported("think", "this model does not reason before it answers")
    if think is not None and can_reason(loaded):
        found["reasoning_effort"] = think if isinstance(think, str) else "medium" if think else "none"
    return found


def _as_openais(message: Any) -> Any:
    """A message whose `thinking` has the name that chat templates know, and whose `images` are parts of its content."""
    if not isinstance(message, dict):
        return message
    thinking, images = message.get("thinking"), message.get("images")
    found = {**message, "reasoning_content": thinking} if isinstance(thinking, str) and thinking else message
    parts = [{"type": "text", "text": message.get("content") or ""}, {"type": "image"}]
    return {**found, "content": parts} if images else found


def read_keep_alive(given: Any) -> float | None:
    """For how many seconds the model is to stay loaded without a request; infinite where negative, None where absent.

    A number is of seconds; a text may say minutes or hours: 300, "5m", "1h". Raises HttpError.
    """
    if given is None:
        return None
    text = str(given) if isinstance(given, int | float) and not isinstance(given, bool) else given
    found = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise wrong("keep_alive", 'must be seconds or a duration such as "5m"; -1 is for ever', given)
    return math.inf if text.startswith("-") else float(found[1]) * _SECONDS[found[2]]


class OllamaExchange(Exchange):
    media_type = "application/x-ndjson"
    ping = b""  # its clients parse every line
    streams_by_default = True

    def __init__(self, work: Work, *, is_chat: bool, is_stream: bool) -> None:
        super().__init__(work, is_stream=is_stream)
        self._is_chat = is_chat

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return self._part(answer.text, answer.reasoning, answer.calls) | _end(answer)

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        (answer,) = answers
        async for delta in answer.deltas():
            said = {"reasoning" if delta.part.kind == "reasoning" else "text": delta.text}
            if delta.text or delta.part.call is not None:
                yield _line(self._part(**said, calls=[delta.part.call] if delta.part.call else []) | {"done": False})
        yield _line(self._part() | _end(answer))

    @classmethod
    def failed_early(cls, error: HttpError) -> bytes:
        return _line(error.body("/api/"))

    def _part(self, text: str = "", reasoning: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        head: dict[str, Any] = {"model": self.name, "created_at": written(time())}
        thinking = {"thinking": reasoning} if reasoning else {}
        if not self._is_chat:
            return head | {"response": text} | thinking
        shown = [{"function": {"name": call.name, "arguments": call.input}} for call in calls]
        message = {"role": "assistant", "content": text} | thinking | ({"tool_calls": shown} if shown else {})
        return head | {"message": message}


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
        "seed": answer.seed,
    }


def _line(value: Any) -> bytes:
    return compact(value).encode() + b"\n"


# -- models of the user's own folder: pulled, to be served when the server is started with them, and deleted


class Named(Fields):
    """A request to `/api/show`, `/api/pull` or `/api/delete`. Older clients call the model `name`, and so does Ollama's
    for JavaScript.
    """

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = None


async def read_named(services: Services, request: Request) -> Named:
    return read(Named, parse_object(await read_body(request, services.limits)), [])


class _ClientLeft(BaseException):
    """Ends a download, whose files are kept for the next one; no `Exception`, after which it would be tried again."""


async def _asked_model(services: Services, request: Request) -> tuple[Named, str, bool]:
    """A request, the name in it, and whether it is that of a served model. Raises HttpError."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise HttpError(403, "other web pages may not change the models of this machine", code="wrong_origin")
    try:
        is_near = request.client is None or ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:  # a test's client
        is_near = True
    if not is_near and services.api_key is None:
        raise HttpError(403, "other machines may change models only with an API key: start the server with one")
    asked = await read_named(services, request)
    if not (name := asked.model or asked.name):
        raise bad_request("model is missing: give the name of one", "model")
    served = {without_tag(each) for service in services.all for each in service.names}
    return asked, name, without_tag(name) in served


async def respond_pull(services: Services, request: Request) -> Response:
    """Get a model into the user's folder, as `edgespec pull` does (Ollama). Lines of JSON tell how far it is."""
    asked, name, is_served = await _asked_model(services, request)
    try:
        lines = _lines_of(name, is_here=is_served or parse(name) is None)
    except ModelNotFound as exc:
        raise HttpError(404, str(exc), param="model", code="model_not_found") from exc
    if asked.stream is not False:
        encoded = (compact(line).encode() + b"\n" async for line in lines)
        return StreamingResponse(encoded, headers=STREAM_HEADERS, media_type="application/x-ndjson")
    *_, last = [line async for line in lines]
    return json_response(last, 200 if last == _SUCCESS else 500)


async def _lines_of(name: str, *, is_here: bool) -> AsyncIterator[Mapping[str, Any]]:
    """What Ollama says of a pull."""
    yield {"status": "pulling manifest"}
    if is_here:
        yield _SUCCESS
        return
    loop, lines, has_left = asyncio.get_running_loop(), asyncio.Queue[Mapping[str, Any]](), False

    def tell(**line: Any) -> None:
        loop.call_soon_threadsafe(lines.put_nowait, line)

    def on_bytes(file: str, done: int, total: int) -> None:
        if has_left:
            raise _ClientLeft
        tell(status=f"pulling {file}", digest=file, total=total, completed=done)

    def work() -> None:
        try:
            pull(name, on_bytes, lambda text: tell(status=text))
            tell(status=f"{name} is here: this server serves it when it is started with it")
            tell(**_SUCCESS)
        except EdgespecError as exc:
            tell(error=exc.on_the_command_line)
        finally:
            tell()  # an empty one is the end

    pulling = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        while line := await lines.get():
            yield line
        await pulling
    finally:
        has_left = True


async def respond_delete(services: Services, request: Request) -> Response:
    """Remove a model that was pulled or added, as `edgespec rm` does (Ollama)."""
    _, name, is_served = await _asked_model(services, request)
    if is_served:
        raise HttpError(409, f"{shown(name)} is being served: stop the server first", code="in_use")
    try:
        await asyncio.to_thread(remove, name)
    except ModelNotFound as exc:
        raise HttpError(404, f"no model {shown(name)} was pulled or added here", code="model_not_found") from exc
    except (ConfigError, StateError) as exc:  # whose messages hold paths
        raise bad_request(f"{shown(name)} cannot be removed here: edgespec rm says why", "model") from exc
    return Response()

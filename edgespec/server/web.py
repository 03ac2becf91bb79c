"""Between ASGI and the protocols: bodies within limits, answers that end when their client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgespec.errors import shown
from edgespec.server.answer import Answer, Endpoint, Exchange, answering, compact
from edgespec.server.http_errors import HttpError, as_http_error
from edgespec.server.requests import parse_object
from edgespec.server.service import RequestLimits, Services

Returned = TypeVar("Returned")
Handler = Callable[[Request], Awaitable[Response]]
NOTES = "X-Edgespec-Note"
_MOST_NOTE = 2000
CLIENT_LEFT = 499  # nginx's number; nobody receives it
BEGINS_AFTER_S = 5.0  # until then a stream that fails has a status of its own
PING_EVERY_S = 10.0
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(compact(value), status, headers, media_type="application/json")


def error_response(error: Exception, path: str) -> Response:
    """Any exception in the shape of the protocol that `path` belongs to."""
    known = as_http_error(error)
    return json_response(known.body(path), known.status, known.headers)


async def read_body(request: Request, limits: RequestLimits) -> bytes:
    """The whole body. Raises HttpError 413 and 415, and ClientDisconnect."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, f"a body in Content-Encoding {shown(encoding)} cannot be read: send it as it is")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limits.max_body_bytes:
            raise HttpError(413, f"the body is too large: at most {limits.max_body_bytes} bytes are allowed")
    return bytes(data)


def _told(notes: Sequence[str]) -> dict[str, str]:
    """A header with the notes of a request, whose body has no place for them."""
    text = "; ".join(dict.fromkeys(notes))[:_MOST_NOTE]
    return {NOTES: "".join(char if " " <= char <= "~" else "?" for char in text)} if notes else {}


async def while_connected(receive: Receive, work: Awaitable[Returned]) -> Returned:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientDisconnect then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamedResponse(Response):
    """A response that is sent as it comes. `has_begun`: whether its headers are sent; `failure`: its last part then.

    Once `opened`, it begins within seconds even without a part, and pings follow where nothing else does: reading a
    long prompt, or loading a model, takes minutes, and clients and proxies between give up a connection that is silent
    for as little as one.
    """

    def __init__(self, send: Send, form: type[Exchange]) -> None:
        super().__init__(headers=STREAM_HEADERS, media_type=form.media_type)
        del self.headers["content-length"]
        self._send, self._ping, self.failure = send, form.ping, form.failed_early
        self.opened, self.has_begun = asyncio.Event(), False
        self._latest_s = 0.0  # when something was sent
        self._one_writer = asyncio.Lock()

    async def write(self, part: bytes, *, is_last: bool = False) -> None:
        """Send `part` after the headers, which an empty one sends alone."""
        async with self._one_writer:
            if not self.has_begun:
                self.has_begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if part or is_last:
                await self._send({"type": "http.response.body", "body": part, "more_body": not is_last})
            self._latest_s = asyncio.get_running_loop().time()

    async def keep_alive(self) -> None:
        await self.opened.wait()
        await asyncio.sleep(BEGINS_AFTER_S)
        await self.write(b"")
        while self._ping:
            silent_s = asyncio.get_running_loop().time() - self._latest_s
            if silent_s < PING_EVERY_S:
                await asyncio.sleep(PING_EVERY_S - silent_s)
            else:
                await self.write(self._ping)


class Answering:
    """The ASGI application of a path with a body. Answers end when their client leaves.

    A failure has a status of its own until a stream begins, and is its last part after that.
    """

    def __init__(self, services: Services, endpoint: Endpoint) -> None:
        self._services, self._read = services, endpoint.read
        self._form, self._streams = endpoint.form or Exchange, endpoint.form is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream, limits = StreamedResponse(send, self._form), self._services.limits
        try:
            async with asyncio.timeout(limits.timeout_s):
                body = await read_body(Request(scope, receive), limits)
                whole = await while_connected(receive, self._kept_alive(body, scope["path"], stream))
        except ClientDisconnect:
            if not stream.has_begun:
                await Response(status_code=CLIENT_LEFT)(scope, receive, send)
        except Exception as exc:
            if stream.has_begun:
                await stream.write(stream.failure(as_http_error(exc)), is_last=True)
            else:
                await error_response(exc, scope["path"])(scope, receive, send)
        else:
            if stream.has_begun:  # perhaps before it was known that the answer is whole
                await stream.write(b"" if whole is None else bytes(whole.body) + b"\n", is_last=True)
            elif whole is not None:
                await whole(scope, receive, send)

    async def _kept_alive(self, body: bytes, path: str, stream: StreamedResponse) -> Response | None:
        alive = asyncio.ensure_future(stream.keep_alive())
        try:
            return await self._answered(body, path, stream)
        finally:
            alive.cancel()
            await asyncio.gather(alive, return_exceptions=True)

    async def _answered(self, body: bytes, path: str, stream: StreamedResponse) -> Response | None:
        """The answer, or None where it was streamed. Loads the model where it was unloaded."""
        services, notes = self._services, list[str]()
        values = await asyncio.to_thread(parse_object, body)
        service = services.asked_by(values, path, notes)
        # Of several models the one that answers at once may have to make way for another before the stream begins.
        may_wait = services.are_several or not service.is_open
        if self._streams and may_wait and values.get("stream", self._form.streams_by_default) is True:
            stream.opened.set()
        async with service.using() as loaded:
            loaded.scheduler.admit()
            found = await loaded.scheduler.prepare(self._read, loaded, values, notes)
            if isinstance(found, dict):
                return json_response(found, headers=_told(notes))
            async with answering(found, notes) as answers:
                if found.is_stream:
                    await _stream(found, answers, notes, stream)
                    return None
                for answer in answers:
                    await answer.read()
                whole = found.whole(answers)
                return json_response(whole, headers=_told(notes))


async def _stream(
    exchange: Exchange, answers: Sequence[Answer], notes: Sequence[str], stream: StreamedResponse
) -> None:
    stream.headers.update(_told(notes))
    stream.failure = exchange.failure
    stream.opened.set()
    async for part in exchange.stream(answers):
        await stream.write(part)
        await asyncio.sleep(0)  # lets the loop notice that the client has left

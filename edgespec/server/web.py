"""Between ASGI and the protocols: bodies within limits, answers that end when their client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.errors import shown
from edgespec.platform.memory import return_freed_memory
from edgespec.server.answer import Exchange, compact
from edgespec.server.http_errors import HttpError, as_http_error
from edgespec.server.requests import Fields, parse_object
from edgespec.server.service import Limits, Loaded, Names, Service, Services

logger = logging.getLogger("edgespec")
Returned = TypeVar("Returned")
Handler = Callable[[Request], Awaitable[Response]]
NOTES = "X-Edgespec-Note"
_MOST_NOTED, _MOST_NOTE = 64, 2000
_LARGE_AT_ONCE, _SMALL_BYTES = 4, 1 << 16  # those that are small are not counted
_FORGOTTEN_S = 1.0
CLIENT_LEFT = 499  # nginx's number; nobody receives it
BEGINS_AFTER_S = 5.0  # until then a stream that fails has a status of its own
PING_EVERY_S = 10.0
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def json_response(value: Any, status: int = 200) -> Response:
    return Response(compact(value), status, media_type="application/json")


def error_response(error: Exception, path: str) -> Response:
    """Any exception in the shape of the protocol that `path` belongs to."""
    known = as_http_error(error)
    return JSONResponse(known.body(path), known.status, headers=known.headers)


class Bodies:
    """The bodies that are read or checked: so many large ones at once, and the others wait."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._large = limits, asyncio.Semaphore(_LARGE_AT_ONCE)

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """The whole body, which counts until it is closed or the block ends. Raises HttpError 408, 413, 415 or 503."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HttpError(415, f"a body in Content-Encoding {shown(encoding)} cannot be read: send it as it is")
        most, data = self._limits.max_body_bytes, bytearray()
        given = request.headers.get("content-length", "")
        body = Body(None if given.isdecimal() and int(given) <= _SMALL_BYTES else await self._taken())
        try:
            try:
                async with asyncio.timeout(self._limits.body_timeout_s):
                    async for part in request.stream():
                        data += part
                        if len(data) > most:
                            raise HttpError(413, f"the body is too large: at most {most} bytes are allowed")
            except TimeoutError:
                raise HttpError(408, f"the body did not arrive within {self._limits.body_timeout_s:g} s") from None
            body.data = bytes(data)
            del data
            yield body
        finally:
            body.close()

    async def _taken(self) -> asyncio.Semaphore:
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                await self._large.acquire()
        except TimeoutError:
            raise HttpError(503, "too many large requests are being read: try again later", code="busy") from None
        return self._large


@dataclass(slots=True)
class Body:
    """A request's body. `counted_by`: what a large one is one of."""

    counted_by: asyncio.Semaphore | None
    data: bytes = b""

    def let_others(self) -> None:
        """Count no longer."""
        if self.counted_by is not None:
            self.counted_by.release()
        self.counted_by = None

    def close(self) -> None:
        """It is no longer needed, nor what was read from it."""
        is_large, self.data = len(self.data) > _SMALL_BYTES, b""
        self.let_others()
        if is_large:
            # Later, when what was read is forgotten too; beside the loop, since it takes its time.
            loop = asyncio.get_running_loop()
            loop.call_later(_FORGOTTEN_S, loop.run_in_executor, None, return_freed_memory)


def _told(loaded: Loaded, notes: Sequence[str]) -> dict[str, str]:
    """A header with the notes of a request, whose body has no place for them; the log gets each of them once."""
    for note in notes:
        if note not in loaded.noted and len(loaded.noted) < _MOST_NOTED:
            loaded.noted.add(note)
            logger.info("a request asked for what it does not get: %s", note)
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


def forget_frames(error: BaseException | None) -> None:
    """Let go of what a failed request has read: its frames hold its error, and its error them."""
    while error is not None:
        error.__traceback__, error = None, error.__context__


class Stream(Response):
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


class Endpoint(NamedTuple):
    """A path that takes a body, which is a `request`. `read`: checks it and, by the `kind` of the path, answers it, or
    encodes its prompts; it blocks meanwhile, and adds to the notes what the request does not get.

    `form`: of its streams, None where it has none; `at_rest`: gives the body for a request that needs no model, while
    none is loaded, and None for one that does.
    """

    request: type[Fields]
    read: Callable[..., Any]
    kind: Callable[[Services, Bodies, Endpoint], Handler | ASGIApp]
    form: type[Exchange] | None = None
    at_rest: Callable[[Names, Mapping[str, Any]], dict[str, Any] | None] | None = None


class Answering:
    """The ASGI application of a path that generates. Answers end when their client leaves.

    A failure has a status of its own until a stream begins, and is its last part after that.
    """

    def __init__(self, services: Services, bodies: Bodies, endpoint: Endpoint) -> None:
        self._services, self._bodies = services, bodies
        self._read, self._form, self._at_rest = endpoint.read, endpoint.form or Exchange, endpoint.at_rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = Stream(send, self._form)
        try:
            async with AsyncExitStack() as use:
                body = await use.enter_async_context(self._bodies.read(Request(scope, receive)))
                async with asyncio.timeout(self._services.limits.timeout_s):
                    whole = await while_connected(receive, self._kept_alive(body, scope["path"], stream, use))
        except ClientDisconnect:
            if not stream.has_begun:
                await Response(status_code=CLIENT_LEFT)(scope, receive, send)
        except Exception as exc:
            if stream.has_begun:
                await stream.write(stream.failure(as_http_error(exc)), is_last=True)
            else:
                await error_response(exc, scope["path"])(scope, receive, send)
            forget_frames(exc)
        else:
            if stream.has_begun:  # perhaps before it was known that the answer is whole
                await stream.write(b"" if whole is None else bytes(whole.body) + b"\n", is_last=True)
            elif whole is not None:
                await whole(scope, receive, send)

    async def _kept_alive(self, body: Body, path: str, stream: Stream, use: AsyncExitStack) -> Response | None:
        alive = asyncio.ensure_future(stream.keep_alive())
        try:
            return await self._answered(body, path, stream, use)
        finally:
            alive.cancel()
            await asyncio.gather(alive, return_exceptions=True)

    async def _answered(self, body: Body, path: str, stream: Stream, use: AsyncExitStack) -> Response | None:
        """The answer, or None where it was streamed. Loads the model where it was unloaded."""
        service = asked_by(self._services, body, path)
        # Of several models the one that answers at once may have to make way for another before the stream begins.
        if not service.is_new and (self._services.are_several or not service.answers_at_once):
            values = parse_object(body.data)
            at_rest = None if service.answers_at_once or self._at_rest is None else self._at_rest(service.names, values)
            if at_rest is not None:
                return json_response(at_rest)
            if values.get("stream", self._form.streams_by_default) is True:
                body.let_others()  # it waits for a model, which may take long
                stream.opened.set()
        loaded = await use.enter_async_context(service.using())
        notes: list[str] = []
        exchange = await loaded.scheduler.prepare(lambda: self._read(loaded, parse_object(body.data), notes))
        tickets = await loaded.scheduler.submit(exchange.jobs)
        for ticket in tickets:
            use.callback(ticket.cancel)
        body.close()
        if exchange.keep_loaded_s is not None and service.residence is not None:
            service.residence.keep_for(exchange.keep_loaded_s)
        answers = [exchange.answer(ticket) for ticket in tickets]
        notes += [note for ticket in tickets for note in ticket.generation.request.notes]
        if not exchange.is_stream:
            for answer in answers:
                await answer.read()
            whole = json_response(exchange.whole(answers))
            whole.headers.update(_told(loaded, notes))
            return whole
        stream.headers.update(_told(loaded, notes))
        stream.failure = exchange.failure
        stream.opened.set()
        async for part in exchange.stream(answers):
            await stream.write(part)
            await asyncio.sleep(0)  # lets the loop notice that the client has left
        return None


def asked_by(services: Services, body: Body, path: str) -> Service:
    """The model that a request is for. One alone gets every request, which is read later, in a thread."""
    return services.asked_by(parse_object(body.data), path) if services.are_several else services.default

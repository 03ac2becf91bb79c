"""Between ASGI and the protocols: bodies within limits, answers that end when their client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from edgespec.errors import shown
from edgespec.server.answer import Answer
from edgespec.server.exchange import Exchange, Read, compact
from edgespec.server.fields import Fields, parse_object
from edgespec.server.http_errors import HttpError, as_http_error
from edgespec.server.service import Limits, Loaded, Service
from edgespec.server.ticket import Ticket

logger = logging.getLogger("edgespec")
Returned = TypeVar("Returned")
NOTES = "X-Edgespec-Note"
_MOST_NOTED, _MOST_NOTE = 64, 2000
CLIENT_LEFT = 499  # nginx's number; nobody receives it
BEGINS_AFTER_S = 5.0  # until then a stream that fails has a status of its own
PING_EVERY_S = 10.0
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(compact(value), status, media_type="application/json")


def error_response(error: Exception, path: str) -> Response:
    """Any exception in the shape of the protocol that `path` belongs to."""
    known = as_http_error(error)
    return JSONResponse(known.body(path), known.status, headers=known.headers)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body. Raises HttpError 408, 413 or 415."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, f"a body in Content-Encoding {shown(encoding)} cannot be read: send it as it is")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > limits.max_body_bytes:
                    raise HttpError(413, f"the body is too large: at most {limits.max_body_bytes} bytes are allowed")
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {limits.body_timeout_s:g} s") from None
    return bytes(body)


async def respond(request: Request, service: Service, read: Read, body: bytes) -> Response:
    """Check and queue a request; its answer, whole or as a stream. Loads the model where it was unloaded.

    Raises HttpError, EdgespecError, and ClientDisconnect if the client leaves.
    """
    began_s, timeout_s = monotonic(), service.limits.timeout_s
    async with AsyncExitStack() as use:
        loaded = await use_model(request, service, use)
        notes: list[str] = []
        async with asyncio.timeout(_left_s(began_s, timeout_s)):
            exchange, tickets = await while_connected(request.receive, _queued(loaded, read, body, notes))
        if exchange.keep_loaded_s is not None and service.residence is not None:
            service.residence.keep_for(exchange.keep_loaded_s)
        answers = [exchange.answer(ticket) for ticket in tickets]
        told, left_s = _told(loaded, notes), _left_s(began_s, timeout_s)
        if exchange.is_stream:
            return EventStream(exchange, answers, left_s, told, use.pop_all())
        try:
            whole = await while_connected(request.receive, _whole(exchange, answers, left_s))
        finally:
            cancel(answers)
        whole.headers.update(told)
        return whole


def _left_s(began_s: float, timeout_s: float | None) -> float | None:
    """Seconds until a request that began then takes too long; None: as long as it likes."""
    return None if timeout_s is None else began_s + timeout_s - monotonic()


async def _queued(loaded: Loaded, read: Read, body: bytes, notes: list[str]) -> tuple[Exchange, list[Ticket]]:
    """A request and its places in the queue."""
    exchange = await loaded.scheduler.prepare(lambda: read(loaded, Fields(parse_object(body), notes=notes)))
    return exchange, await loaded.scheduler.submit(exchange.jobs)


async def use_model(request: Request, service: Service, use: AsyncExitStack) -> Loaded:
    """The model, which stays loaded until `use` is closed. Raises as `respond` while it waits."""
    entering = use.enter_async_context(service.using())
    if service.answers_at_once:
        return await entering
    async with asyncio.timeout(service.limits.timeout_s):
        return await while_connected(request.receive, entering)


def _told(loaded: Loaded, notes: Sequence[str]) -> dict[str, str]:
    """A header with the notes of a request, whose body has no place for them; the log gets each of them once."""
    for note in notes:
        if note not in loaded.noted and len(loaded.noted) < _MOST_NOTED:
            loaded.noted.add(note)
            logger.info("a request asked for what it does not get: %s", note)
    text = "; ".join(dict.fromkeys(notes))[:_MOST_NOTE]
    return {NOTES: "".join(char if " " <= char <= "~" else "?" for char in text)} if notes else {}


async def _whole(exchange: Exchange, answers: list[Answer], timeout_s: float | None) -> Response:
    async with asyncio.timeout(timeout_s):
        for answer in answers:
            await answer.read()
    return json_response(exchange.whole(answers))


def cancel(answers: list[Answer]) -> None:
    """End what still runs or waits."""
    for answer in answers:
        answer.ticket.cancel()


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


class EventStream(Response):
    """An answer that is sent as it comes.

    A failure in the first seconds is an ordinary error with its own status. Then the response begins even without a
    part, and pings follow where nothing else does: reading a long prompt takes minutes, and clients and proxies between
    give up a connection that is silent for as little as one. `use`: of the model, closed when all is sent.
    `has_begun`: whether its headers are sent.
    """

    def __init__(
        self,
        exchange: Exchange,
        answers: list[Answer],
        timeout_s: float | None,
        headers: Mapping[str, str],
        use: AsyncExitStack,
    ) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers}, media_type=exchange.media_type)
        del self.headers["content-length"]
        self._exchange, self._answers, self._timeout_s, self._use = exchange, answers, timeout_s, use
        self.has_begun = False
        self._latest_s = 0.0  # when something was sent
        self._one_writer = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_parts(send))
        except ClientDisconnect:
            return
        except Exception as exc:
            error = as_http_error(exc)
            if not self.has_begun:
                await error_response(error, scope["path"])(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": self._exchange.failure(error), "more_body": False})
        finally:
            cancel(self._answers)
            await self._use.aclose()

    async def _send_parts(self, send: Send) -> None:
        async with asyncio.timeout(self._timeout_s):
            alive = asyncio.ensure_future(self._keep_alive(send))
            try:
                async for part in self._exchange.stream(self._answers):
                    await self._write(send, part)
                    await asyncio.sleep(0)  # lets the loop notice that the client has left
            finally:
                alive.cancel()
                await asyncio.gather(alive, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """Begin the response though there is no part yet, and then interrupt every long silence."""
        await asyncio.sleep(BEGINS_AFTER_S)
        await self._write(send, b"")
        while self._exchange.ping:
            silent_s = asyncio.get_running_loop().time() - self._latest_s
            if silent_s < PING_EVERY_S:
                await asyncio.sleep(PING_EVERY_S - silent_s)
            else:
                await self._write(send, self._exchange.ping)

    async def _write(self, send: Send, part: bytes) -> None:
        """Send `part` after the headers, which an empty one sends alone."""
        async with self._one_writer:
            if not self.has_begun:
                self.has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            self._latest_s = asyncio.get_running_loop().time()

"""Between ASGI and the protocols: bodies within limits, answers that end when their client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from edgespec.errors import shown
from edgespec.platform.memory import return_freed_memory
from edgespec.server.answer import Answer
from edgespec.server.exchange import Exchange, compact
from edgespec.server.http_errors import HttpError, as_http_error
from edgespec.server.requests import parse_object
from edgespec.server.scheduler import Ticket
from edgespec.server.service import Limits, Loaded, Service

logger = logging.getLogger("edgespec")
Returned = TypeVar("Returned")
Read = Callable[[Loaded, Mapping[str, Any], list[str]], Exchange]
"""Checks a request and encodes its prompts; blocks meanwhile. Adds to the notes what it does not get."""
NOTES = "X-Edgespec-Note"
_MOST_NOTED, _MOST_NOTE = 64, 2000
_BODIES, _SMALL_BYTES = 4, 1 << 16  # so many of the largest size at once; those that are not counted
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
    """The bodies that are read or checked at once: large ones wait until together they have at most so many bytes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left = _BODIES * limits.max_body_bytes
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """The whole body, which counts until it is closed or the block ends. Raises HttpError 408, 413, 415 or 503."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HttpError(415, f"a body in Content-Encoding {shown(encoding)} cannot be read: send it as it is")
        most, body = self._limits.max_body_bytes, bytearray()
        given = request.headers.get("content-length", "")
        size = min(int(given), most) if given.isdecimal() else most
        counted = Body(self, size if size > _SMALL_BYTES else 0)
        await self._take(counted)
        try:
            try:
                async with asyncio.timeout(self._limits.body_timeout_s):
                    async for part in request.stream():
                        body += part
                        if len(body) > most:
                            raise HttpError(413, f"the body is too large: at most {most} bytes are allowed")
            except TimeoutError:
                raise HttpError(408, f"the body did not arrive within {self._limits.body_timeout_s:g} s") from None
            counted.data = bytes(body)
            del body
            yield counted
        finally:
            counted.close()

    async def _take(self, body: Body) -> None:
        if not body.size:
            return
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                while self._left < body.size:
                    self._freed.clear()
                    await self._freed.wait()
            self._left -= body.size
        except TimeoutError:
            body.size = 0
            raise HttpError(503, "too many large requests are being read: try again later", code="busy") from None

    def give_back(self, size: int) -> None:
        self._left += size
        self._freed.set()


@dataclass(slots=True)
class Body:
    """A request's body. `size`: the bytes that it counts for."""

    bodies: Bodies
    size: int
    data: bytes = b""

    def close(self) -> None:
        """It is no longer needed, nor what was read from it."""
        size, self.size, self.data = self.size, 0, b""
        if size:
            self.bodies.give_back(size)
            # Later, when what was read is forgotten too; beside the loop, since it takes its time.
            loop = asyncio.get_running_loop()
            loop.call_later(_FORGOTTEN_S, loop.run_in_executor, None, return_freed_memory)


async def respond(request: Request, service: Service, read: Read, body: Body) -> Response:
    """Check and queue a request; its answer, whole or as a stream. Loads the model where it was unloaded.

    Raises HttpError, EdgespecError, and ClientDisconnect if the client leaves.
    """
    began_s, timeout_s = monotonic(), service.limits.timeout_s
    async with AsyncExitStack() as use:
        loaded = await use_model(request, service, use)
        notes: list[str] = []
        async with asyncio.timeout(_left_s(began_s, timeout_s)):
            exchange, tickets = await while_connected(request.receive, _queued(loaded, read, body, notes))
        body.close()
        if exchange.keep_loaded_s is not None and service.residence is not None:
            service.residence.keep_for(exchange.keep_loaded_s)
        answers = [exchange.answer(ticket) for ticket in tickets]
        notes += [note for ticket in tickets for note in ticket.generation.request.notes]
        told, left_s = _told(loaded, notes), _left_s(began_s, timeout_s)
        if exchange.is_stream:
            return EventStream(exchange, answers, left_s, told, use.pop_all())
        try:
            whole, found = await while_connected(request.receive, _whole(exchange, answers, left_s))
        finally:
            cancel(answers)
        whole.headers.update(_told(loaded, notes + found))
        return whole


async def _found_in(loaded: Loaded, answers: Sequence[Answer]) -> list[str]:
    """What is wrong with answers that are finished, as notes."""
    checked = [each for answer in answers if (each := answer.ticket.generation).request.schema]
    found = [await loaded.scheduler.prepare(each.check_answer) for each in checked]
    return list(filter(None, found))


def _left_s(began_s: float, timeout_s: float | None) -> float | None:
    """Seconds until a request that began then takes too long; None: as long as it likes."""
    return None if timeout_s is None else began_s + timeout_s - monotonic()


async def _queued(loaded: Loaded, read: Read, body: Body, notes: list[str]) -> tuple[Exchange, list[Ticket]]:
    exchange = await loaded.scheduler.prepare(lambda: read(loaded, parse_object(body.data), notes))
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


async def _whole(exchange: Exchange, answers: list[Answer], timeout_s: float | None) -> tuple[Response, list[str]]:
    async with asyncio.timeout(timeout_s):
        for answer in answers:
            await answer.read()
        found = await _found_in(exchange.work.loaded, answers)
    return json_response(exchange.whole(answers)), found


def cancel(answers: list[Answer]) -> None:
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
        self._exchange, self._answers = exchange, answers
        self._timeout_s, self._use = timeout_s, use
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
                found = await _found_in(self._exchange.work.loaded, self._answers)
                if found and self._exchange.ping:  # the headers are sent: a comment, as a ping is
                    await self._write(send, f": {_told(self._exchange.work.loaded, found)[NOTES]}\n\n".encode())
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


class WakingStream(Response):
    """`answer` becomes the response, which in the first seconds may be any; then it has begun as a stream of `form`."""

    def __init__(self, answer: Awaitable[Response], form: type[Exchange]) -> None:
        super().__init__(headers=STREAM_HEADERS, media_type=form.media_type)
        del self.headers["content-length"]
        self._answer, self._form = answer, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._answer)
        has_begun = False
        try:
            await asyncio.wait({task}, timeout=BEGINS_AFTER_S)
            while not task.done():
                if not has_begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                elif self._form.ping:
                    await send({"type": "http.response.body", "body": self._form.ping, "more_body": True})
                has_begun = True
                await asyncio.wait({task}, timeout=PING_EVERY_S)
            response = task.result()
        except ClientDisconnect:
            return
        except Exception as exc:
            error = as_http_error(exc)
            if has_begun:
                await send({"type": "http.response.body", "body": self._form.failed_early(error), "more_body": False})
            else:
                await error_response(error, scope["path"])(scope, receive, send)
            return
        finally:
            task.cancel()
        if has_begun and not isinstance(response, EventStream):  # Ollama's answer to a request without a text
            await send({"type": "http.response.body", "body": bytes(response.body) + b"\n", "more_body": False})
            return
        if isinstance(response, EventStream):
            response.has_begun = has_begun
        await response(scope, receive, send)

"""`edgespec serve --stdio`: JSON lines for a program that starts edgespec as its child; no port, no HTTP.

Out: {"event": "hello", "protocol": 1, "version": ...} at once, "ready" once the model answers, then for each request
"delta"s (and "progress" if asked for) and one "done" or "error". In: {"op": "chat" | "generate", "id": ..., ...} with
the fields of /v1/chat/completions or /v1/completions, {"op": "cancel", "id": ...}, {"op": "hello", "protocol": 1},
{"op": "close"}. The end of standard input ends the process, so that no sidecar outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO, Annotated, Any, Literal

from msgspec import Meta

from edgespec import __version__
from edgespec.errors import shown
from edgespec.server.answer import (
    Answer,
    Delta,
    Endpoint,
    Exchange,
    answering,
    compact,
    logprobs_of,
    prompt_progress,
    usage,
)
from edgespec.server.chat import ChatRequest, answer_chat
from edgespec.server.completions import Completion, answer_completion
from edgespec.server.http_errors import HttpError, as_http_error, bad_request
from edgespec.server.requests import Fields, parse_object, read, unsupported
from edgespec.server.residence import handling
from edgespec.server.service import Services
from edgespec.vocabulary import Vocabulary

PROTOCOL = 1
_ENDPOINTS = {"chat": Endpoint(ChatRequest, answer_chat), "generate": Endpoint(Completion, answer_completion)}


class _Line(Fields, kw_only=True):
    op: Literal["chat", "generate", "cancel", "close", "hello"]
    id: Annotated[str, Meta(max_length=128)] | None = None


def serve_stdio(services: Services, source: IO[bytes], sink: IO[bytes]) -> None:
    """Serve the lines of `source` until it ends or `close` is asked for; the first model is loaded meanwhile.

    If it ends before the model is loaded, it returns without a model in the service, and loading goes on: native code
    cannot be interrupted, so end the process. Raises what loading raises.
    """
    asyncio.run(_Sidecar(services, sink).run(source))


@dataclass(slots=True)
class _Request:
    """A request that is being answered. `answer` None: it is still being checked or encoded."""

    task: asyncio.Task[None] = field(init=False)
    answer: Answer | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        """End it so that its counts are still read, where there are any."""
        self.is_cancelled = True
        if self.answer is not None:
            self.answer.ticket.cancel()
        else:
            self.task.cancel()

    @property
    def counts(self) -> dict[str, Any]:
        """`usage`, `timings` and `seed` as far as it has come; nothing of one that was not read yet."""
        if self.answer is None:
            return {}
        return {"usage": usage([self.answer]), "timings": self.answer.timings, "seed": self.answer.seed}


class _Sidecar:
    """The requests of one parent process. `emit` never blocks: a thread writes."""

    def __init__(self, services: Services, sink: IO[bytes]) -> None:
        self._services, self._sink = services, sink
        self._requests: dict[str, _Request] = {}
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def emit(self, event: str, **fields: Any) -> None:
        self._events.put({"event": event, **fields})

    async def run(self, source: IO[bytes]) -> None:
        loop = asyncio.get_running_loop()
        writer = threading.Thread(target=self._write, name="edgespec-stdout", daemon=True)
        writer.start()
        self.emit("hello", protocol=PROTOCOL, version=__version__)
        loaded = self._services.default.preload()
        loaded.add_done_callback(lambda done: loop.call_soon_threadsafe(self._on_loaded, done))
        threading.Thread(target=self._read, args=(source, loop), name="edgespec-stdin", daemon=True).start()
        with handling(lambda *_: loop.call_soon_threadsafe(self._lines.put_nowait, None)):
            while (line := await self._lines.get()) is not None and self._handle(line):
                pass
        running = list(self._requests.values())
        for request in running:
            request.task.cancel()
        await asyncio.gather(*(request.task for request in running), return_exceptions=True)
        await asyncio.to_thread(self._services.close)
        self._events.put(None)
        await asyncio.to_thread(writer.join, 5.0)
        if loaded.done():
            loaded.result()

    def _on_loaded(self, done: Future[None]) -> None:
        if done.exception() is not None:
            self._lines.put_nowait(None)  # `run` raises it
            return
        default = self._services.default
        self.emit("ready", model=default.name, context_length=default.require().model.context_length)

    def _read(self, source: IO[bytes], loop: asyncio.AbstractEventLoop) -> None:
        """Hand every line to the loop; a line over the limit is cut, which makes it an error."""
        most, is_rest = self._services.limits.max_body_bytes, False
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed; RuntimeError: the loop is gone
            while line := source.readline(most + 1):
                if not is_rest:
                    loop.call_soon_threadsafe(self._lines.put_nowait, line)
                is_rest = not line.endswith(b"\n")
            loop.call_soon_threadsafe(self._lines.put_nowait, None)

    def _write(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the parent is gone; the end of its input follows
            while (event := self._events.get()) is not None:
                self._sink.write(compact(event).encode() + b"\n")
                self._sink.flush()

    def _handle(self, line: bytes) -> bool:
        """Carry out one line; False ends the process."""
        if not line.strip():
            return True
        request_id = None
        try:
            if len(line) > self._services.limits.max_body_bytes:
                raise HttpError(413, f"the line is too long: at most {self._services.limits.max_body_bytes} bytes")
            values = parse_object(line)
            head = read(_Line, {name: values.pop(name) for name in ("op", "id") if name in values}, [])
            request_id = head.id
            return self._carry_out(head.op, request_id, values)
        except HttpError as exc:
            self._fail(request_id, exc)
            return True

    def _carry_out(self, op: str, request_id: str | None, values: dict[str, Any]) -> bool:
        if op == "hello":
            if values != {"protocol": PROTOCOL}:
                raise bad_request(f"this edgespec speaks protocol {PROTOCOL}", "protocol", "wrong_protocol")
        elif op == "close":
            return False
        elif request_id is None:
            raise bad_request("id is missing: give a string", "id")
        elif op == "cancel":
            if request_id not in self._requests:
                raise bad_request("no request with this id is running", "id", "unknown_id")
            self._requests[request_id].cancel()
        elif request_id in self._requests:
            words = f"a request with the id {shown(request_id)} is already running"
            # Without its id, which would be taken for the end of that other request.
            self._fail(None, bad_request(words, "id", "duplicate_id"))
        else:
            request = self._requests[request_id] = _Request()
            request.task = asyncio.ensure_future(self._answer(request_id, request, values, _ENDPOINTS[op]))
            request.task.add_done_callback(lambda done: self._on_ended(request_id, done))
        return True

    def _on_ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        request = self._requests.pop(request_id)
        if task.cancelled():  # perhaps before it began
            self.emit("done", id=request_id, finish_reason="cancelled", **request.counts)

    async def _answer(self, request_id: str, request: _Request, values: dict[str, Any], endpoint: Endpoint) -> None:
        notes: list[str] = []
        try:
            service = self._services.asked_by(values, notes=notes)
            async with service.using() as loaded, asyncio.timeout(self._services.limits.timeout_s):
                if values.get("timings_per_token"):
                    raise unsupported("timings_per_token", "done has the timings of the answer")
                loaded.scheduler.admit()
                exchange = await loaded.scheduler.prepare(endpoint.read, loaded, values, notes)
                assert isinstance(exchange, Exchange)
                if len(exchange.jobs) > 1 or exchange.is_stream:
                    raise bad_request("each request gets one answer, which is always streamed: leave out n and stream")
                async with answering(exchange, notes) as (answer,):
                    request.answer = answer
                    async for delta in answer.deltas():
                        self._emit_delta(request_id, delta, loaded.model.target.vocabulary)
                    notes = [*dict.fromkeys([*notes, *answer.stats.notes])]  # those of its drafters
        except Exception as exc:
            if not request.is_cancelled:  # an answer that was cut by that is no failure
                self._fail(request_id, as_http_error(exc))
                return
        told = {"notes": notes} if notes else {}
        reason = "cancelled" if request.is_cancelled else answer.finish_reason
        self.emit("done", id=request_id, finish_reason=reason, **request.counts, **told)

    def _emit_delta(self, request_id: str, delta: Delta, vocabulary: Vocabulary) -> None:
        if delta.progress is not None:
            self.emit("progress", id=request_id, **prompt_progress(delta.progress))
            return
        is_text, call = delta.part.kind != "reasoning", delta.part.call
        others: dict[str, Any] = {}
        if call is not None:
            others["tool_calls"] = [{"id": call.id, "name": call.name, "arguments": call.arguments}]
        elif not is_text and delta.text:
            others["reasoning"] = delta.text
        if delta.tokens:
            tokens = logprobs_of(vocabulary, delta.tokens)
            others["logprobs"] = {"content": tokens} if is_text else {"content": [], "reasoning": tokens}
        self.emit("delta", id=request_id, text=delta.text if is_text else "", **others)

    def _fail(self, request_id: str | None, error: HttpError) -> None:
        self.emit("error", id=request_id, **error.body(""))

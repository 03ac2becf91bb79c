"""Runs the requests of all clients on one model: a queue with a limit, and one thread that owns the engine.

As many requests run at once as the model was loaded for (`--parallel`); the others wait in the queue. A slow reader
holds up nobody: the thread does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from edgespec.config.options import GenerateOptions, Sampling
from edgespec.contained import is_wanted
from edgespec.errors import EdgespecError
from edgespec.generation.batching import ContinuousBatch
from edgespec.generation.handle import Generation
from edgespec.reports import PromptProgress, RoundRecord, TokenEvent
from edgespec.runtime import Model
from edgespec.server.http_errors import HttpError, queue_full, stopping
from edgespec.server.metrics import Metrics, answer_line

logger = logging.getLogger("edgespec")
_JOIN_S = 30.0
Returned = TypeVar("Returned")


def in_thread(name: str, function: Callable[[], Returned]) -> Future[Returned]:
    """What `function` will have returned, in a thread of its own that does not keep the process from ending."""
    future: Future[Returned] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as exc:  # whoever waits for it gets it
            future.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


@dataclass(frozen=True, slots=True)
class Job:
    """One generation to run: the prompt's token ids [n], and the options of `Model.stream`.

    `tells_progress`: its events begin with how much of the prompt is read.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    options: GenerateOptions
    tells_progress: bool = False


@dataclass(eq=False, slots=True)
class Ticket:
    """One submitted job. Iterate over it once for its events, in groups of all that are there; `cancel` at any time.

    `forget`: takes it out of the queue; `drafted`: tokens so far by the name of the drafter, kept up to date by whoever
    gives it; `is_read_whole`: its events are wanted when the generation has ended, all at once.
    """

    generation: Generation
    job: Job
    loop: asyncio.AbstractEventLoop
    forget: Callable[[Ticket], None]
    drafted: Mapping[str, int]
    is_read_whole: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    submitted_s: float = field(default_factory=monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _events: list[TokenEvent | PromptProgress] = field(default_factory=list)
    _failure: Exception | None = None
    _is_over: bool = False
    _has_begun: bool = False

    @property
    def age_s(self) -> float:
        return monotonic() - self.submitted_s

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent | PromptProgress]]:
        """Events in order, until the generation has ended. Raises what it failed with."""
        while True:
            await self.ready.wait()
            self.ready.clear()
            with self._lock:
                events, self._events = self._events, []
                is_over = self._is_over
            if events:
                yield events
            if is_over:
                if self._failure is not None:
                    raise self._failure
                return

    def cancel(self) -> None:
        """End it after at most one pass, or at once where it still waits. Cancelling what is over is allowed."""
        self.generation.cancel()
        self.forget(self)

    def post(self, metrics: Metrics, event: TokenEvent | PromptProgress) -> bool:
        """The next event; called by the scheduler's thread. Whether the reader is to be woken for it."""
        if isinstance(event, TokenEvent) and not self._has_begun:
            metrics.count_first_token(self.age_s)
            self._has_begun = True
        with self._lock:
            self._events.append(event)
            is_first = len(self._events) == 1  # else the reader is being woken and has not come yet
        return is_first and not self.is_read_whole

    def end(self, failure: Exception | None = None) -> None:
        with self._lock:
            if not self._is_over:  # the first reason is the one to tell
                self._failure, self._is_over = failure, True
        with suppress(RuntimeError):  # the loop is closed: nobody reads
            self.loop.call_soon_threadsafe(self.ready.set)


class Scheduler:
    """The queue of a model: first come, first served. `max_queued`: jobs that may wait while others run."""

    def __init__(self, model: Model, max_queued: int, metrics: Metrics) -> None:
        self.model, self.max_queued, self.metrics = model, max_queued, metrics
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []
        self._to_wake: list[Ticket] = []  # their readers
        self._changed = threading.Condition()
        self._preparing: set[Future[Any]] = set()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name="edgespec-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_preparing(self) -> int:
        """Requests that are being checked and encoded, those too whose clients have left meanwhile."""
        return len(self._preparing)

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def prepare(self, function: Callable[..., Returned], *args: Any) -> Returned:
        """Call what checks and encodes a request, in a thread of its own: one that takes long holds up nobody else.

        Cancelling it ends what it runs in a child process.
        """
        has_left = threading.Event()

        def wanted() -> Returned:
            is_wanted.set(lambda: not has_left.is_set())
            return function(*args)

        future = in_thread("edgespec-prepare", wanted)
        self._preparing.add(future)
        future.add_done_callback(self._preparing.discard)
        try:
            return await asyncio.wrap_future(future)
        finally:
            has_left.set()

    async def submit(self, jobs: Sequence[Job]) -> list[Ticket]:
        """A ticket for each job, in order; all of them are queued or none.

        Raises HttpError 429 if the queue is full, 503 while the server stops, and the errors of `Model.stream`.
        """
        loop = asyncio.get_running_loop()
        tickets = await self.prepare(lambda: [self._ticket(job, loop) for job in jobs])
        with self._changed:
            self.admit(len(jobs))
            self._waiting.extend(tickets)
            self._changed.notify()
        return tickets

    def _ticket(self, job: Job, loop: asyncio.AbstractEventLoop) -> Ticket:
        drafted = Counter[str]()
        generation = self.model.stream(job.prompt_ids, job.sampling, job.options, partial(self._count_round, drafted))
        return Ticket(generation, job, loop, self.forget, drafted)

    def _count_round(self, drafted: Counter[str], record: RoundRecord) -> None:
        self.metrics.count_round(record)
        if record.drafted_tokens:
            drafted[record.drafter or ""] += record.drafted_tokens

    def admit(self, num_jobs: int = 1) -> None:
        """Raises HttpError 429 where as many requests are prepared, wait and run as may at once, 503 at a stop."""
        if self._is_stopping:
            raise stopping()
        most = self.max_queued + self.model.options.sequences
        if num_jobs > most:
            raise HttpError(400, f"{num_jobs} answers at once; this server takes at most {most}", param="n")
        if num_jobs > most - self.num_running - self.num_waiting - self.num_preparing:
            self.metrics.refused += 1
            raise queue_full(self.num_waiting + self.num_preparing)

    def forget(self, ticket: Ticket) -> None:
        """Take a cancelled ticket out of the queue, if it still waits."""
        with self._changed:
            if ticket not in self._waiting:
                return
            self._waiting.remove(ticket)
        with suppress(EdgespecError):  # the model was closed meanwhile
            ticket.generation.close()
        ticket.end()

    def stop(self) -> None:
        """Refuse new and waiting jobs from now on; the running ones go on."""
        with self._changed:
            self._is_stopping = True
            waiting, self._waiting = list(self._waiting), deque()
            self._changed.notify()
        for ticket in waiting:
            ticket.end(stopping())

    def close(self) -> None:
        """`stop`, cancel the running jobs and wait for the thread to end. The model stays open."""
        self.stop()
        for running in list(self._running):
            running.cancel()
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_stopping:
                    self._changed.wait()
                if not self._waiting:
                    return
            try:
                with self.model.batch() as batch:
                    self._decode(batch)
            except Exception as exc:  # whatever it is, the readers must learn of it and the thread must go on
                self._fail_all(exc)

    def _decode(self, batch: ContinuousBatch) -> None:
        """Run jobs until none is left, or until somebody else waits for the model."""
        self._admit(batch)
        while self._running:
            batch.step()
            for ticket in [ticket for ticket in self._running if ticket.generation.is_over]:
                self._end(ticket, ticket.generation.failure)
            if not batch.is_wanted_elsewhere:
                self._admit(batch)
            self._wake_readers()

    def _post(self, ticket: Ticket, event: TokenEvent | PromptProgress) -> None:
        if ticket.post(self.metrics, event):
            self._to_wake.append(ticket)

    def _wake_readers(self) -> None:
        """Once per pass for all of them: each time they take the interpreter's lock from this thread."""
        tickets, self._to_wake = self._to_wake, []
        for loop in {ticket.loop for ticket in tickets}:
            with suppress(RuntimeError):  # the loop is closed: nobody reads
                loop.call_soon_threadsafe(_wake, [ticket for ticket in tickets if ticket.loop is loop])

    def _admit(self, batch: ContinuousBatch) -> None:
        """Begin the jobs that there is room for, in order."""
        while True:
            with self._changed:
                if not self._waiting or not batch.has_room(self._waiting[0].generation):
                    return
                ticket = self._waiting.popleft()
                self._running.append(ticket)
            try:
                post = partial(self._post, ticket)
                batch.begin(ticket.generation, post, post if ticket.job.tells_progress else None)
            except Exception as exc:
                self._end(ticket, exc)

    def _end(self, ticket: Ticket, failure: Exception | None) -> None:
        self.metrics.add(ticket.generation.stats, has_failed=failure is not None, duration_s=ticket.age_s)
        request, model = ticket.generation.request, self.model
        line = answer_line(ticket.generation.stats, ticket.drafted, request.options, model.options, model.target.facts)
        with suppress(RuntimeError):  # the loop is closed
            # There, since writing may take its time, and the command line knows how much to say by thread.
            ticket.loop.call_soon_threadsafe(logger.info, "%s", line)
        self._running.remove(ticket)  # before the client knows, so that its next request finds room
        ticket.end(failure)

    def _fail_all(self, failure: Exception) -> None:
        """The model cannot be used: it was closed, or a batch broke."""
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
            self._running += waiting
        for ticket in list(self._running):
            self._end(ticket, failure)


def _wake(tickets: Sequence[Ticket]) -> None:
    """Let their readers see the events; called in their loop."""
    for ticket in tickets:
        ticket.ready.set()

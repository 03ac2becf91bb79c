"""Runs the requests of all clients on one model: a queue with a limit, and one thread that owns the engine.

As many requests run at once as the model was loaded for (`--parallel`); the others wait in the queue. A slow reader
holds up nobody: the thread does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, TypeVar

from edgespec.contained import is_wanted
from edgespec.errors import EdgespecError
from edgespec.generation.batching import ContinuousBatch
from edgespec.generation.handle import Generation
from edgespec.reports import RoundRecord, TokenEvent
from edgespec.runtime import Model
from edgespec.server.answer_line import answer_line
from edgespec.server.daemon_threads import DaemonThreads
from edgespec.server.embedding_queue import EmbeddingQueue, stopping
from edgespec.server.http_errors import HttpError, queue_full
from edgespec.server.metrics import Metrics
from edgespec.server.ticket import Job, Ticket

__all__ = ["Job", "Scheduler", "Ticket"]
logger = logging.getLogger("edgespec")
_JOIN_S = 30.0
Returned = TypeVar("Returned")


class Scheduler:
    """The queue of a model: first come, first served. `max_queued`: jobs that may wait while others run."""

    def __init__(self, model: Model, max_queued: int, metrics: Metrics) -> None:
        self.model, self.max_queued, self.metrics = model, max_queued, metrics
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []
        self._to_wake: list[Ticket] = []  # their readers
        self._numbers = count()
        self._changed = threading.Condition()
        self.embeddings = EmbeddingQueue(model, max_queued, metrics)
        # As many as may be waited for: one that takes long holds up nobody else.
        self._preparers = DaemonThreads("edgespec-prepare", max_queued + model.options.parallel)
        self._preparing: set[Future[Any]] = set()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name="edgespec-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for their turn."""
        return len(self._waiting)

    @property
    def num_preparing(self) -> int:
        """Requests that are being checked and encoded, those too whose clients have left meanwhile."""
        return len(self._preparing)

    @property
    def running(self) -> list[Ticket]:
        """The jobs that are being decoded."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        """Jobs that are being decoded."""
        return len(self._running)

    async def prepare(self, function: Callable[..., Returned], *args: Any) -> Returned:
        """Call what checks and encodes a request, in a thread. Cancelling it ends what runs in a child process."""
        has_left = threading.Event()

        def run() -> Returned:
            is_wanted.set(lambda: not has_left.is_set())
            return function(*args)

        work = self._preparers.submit(run)
        self._preparing.add(work)
        work.add_done_callback(self._preparing.discard)
        try:
            return await asyncio.wrap_future(work)
        finally:
            has_left.set()

    async def submit(self, jobs: Sequence[Job]) -> list[Ticket]:
        """A ticket for each job, in order; all of them are queued or none.

        Raises HttpError 429 if the queue is full, 503 while the server stops, and the errors of `Model.stream`.
        """
        self._check_room(len(jobs))  # before the work of preparing them
        drafted = [Counter[str]() for _ in jobs]
        generations = await self.prepare(self._generations, jobs, drafted)
        loop = asyncio.get_running_loop()
        tickets = [
            Ticket(
                generation,
                loop,
                self.forget,
                next(self._numbers),
                counts,
                tells_progress=job.tells_progress,
                reads_only=job.reads_only,
            )
            for generation, counts, job in zip(generations, drafted, jobs, strict=True)
        ]
        with self._changed:
            self._check_room(len(jobs))
            self._waiting.extend(tickets)
            self._changed.notify()
        return tickets

    def _generations(self, jobs: Sequence[Job], drafted: Sequence[Counter[str]]) -> list[Generation]:
        return [
            self.model.stream(job.prompt_ids, job.sampling, job.options, partial(self._count_round, counts))
            for job, counts in zip(jobs, drafted, strict=True)
        ]

    def _count_round(self, drafted: Counter[str], record: RoundRecord) -> None:
        self.metrics.count_round(record)
        if record.drafted_tokens:
            drafted[record.drafter or ""] += record.drafted_tokens

    def _check_room(self, num_jobs: int) -> None:
        if self._is_stopping:
            raise stopping()
        most = self.max_queued + self.model.options.parallel
        room = most - self.num_running - self.num_waiting
        if num_jobs > most:
            raise HttpError(400, f"{num_jobs} answers at once; this server takes at most {most}", param="n")
        if num_jobs > room:
            self.metrics.refused += 1
            raise queue_full(self.num_waiting)

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
        self.embeddings.stop()
        for ticket in waiting:
            ticket.end(stopping())

    def end_running(self) -> None:
        """`stop`, and tell the readers of running jobs that the server stops before these are done."""
        self.stop()
        for ticket in list(self._running):
            ticket.end(stopping())
            ticket.cancel()

    def close(self) -> None:
        """`stop`, cancel the running jobs and wait for the thread to end. The model stays open."""
        self.stop()
        for running in list(self._running):
            running.cancel()
        self.embeddings.close()
        self._preparers.close()
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        while self._has_work():
            try:
                with self.model.batch() as batch:
                    self._decode(batch)
            except Exception as exc:  # whatever it is, the readers must learn of it and the thread must go on
                self._fail_all(exc)

    def _has_work(self) -> bool:
        """Wait until a job waits; False when the server stops."""
        with self._changed:
            while not self._waiting and not self._is_stopping:
                self._changed.wait()
            return bool(self._waiting)

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

    def _post(self, ticket: Ticket, event: TokenEvent) -> None:
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
                on_prompt = ticket.post_progress if ticket.tells_progress else None
                batch.begin(ticket.generation, partial(self._post, ticket), on_prompt)
            except Exception as exc:
                self._end(ticket, exc)

    def _end(self, ticket: Ticket, failure: Exception | None) -> None:
        self.metrics.add(ticket.stats, has_failed=failure is not None, duration_s=ticket.age_s)
        request, model = ticket.generation.request, self.model
        line = answer_line(ticket.stats, ticket.drafted, request.options, model.options, model.target.facts)
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
    for ticket in tickets:
        ticket.wake()

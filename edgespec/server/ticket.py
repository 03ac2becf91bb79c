"""A generation to run for a client, and the handle that brings its events from the engine's thread to its loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from edgespec.config import GenerateOptions
from edgespec.generation.handle import Generation
from edgespec.reports import FinishReason, PromptProgress, Stats, TokenEvent
from edgespec.sampling import Sampling
from edgespec.server.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Job:
    """One generation to run: the prompt's token ids [n], and the options of `Model.stream`.

    `tells_progress`: its reader is told how much of the prompt is read. `reads_only`: the prompt is read for later
    requests; the token that this takes is not shown.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    options: GenerateOptions
    tells_progress: bool = False
    reads_only: bool = False


class Ticket:
    """One submitted job. Iterate over it once for its events, in groups of all that are there; `cancel` at any time.

    `forget`: takes it out of the queue; `number`: counts the jobs of a scheduler. `drafted`: tokens so far by
    the name of the drafter; kept up to date by whoever gives it. A group without events: `take_progress` has something
    new.
    """

    def __init__(
        self,
        generation: Generation,
        loop: asyncio.AbstractEventLoop,
        forget: Callable[[Ticket], None],
        number: int = 0,
        drafted: Mapping[str, int] | None = None,
        *,
        tells_progress: bool = False,
        reads_only: bool = False,
    ) -> None:
        self._generation, self.loop, self._forget, self.number = generation, loop, forget, number
        self.drafted: Mapping[str, int] = {} if drafted is None else drafted
        self.tells_progress, self.reads_only = tells_progress, reads_only
        self._progress: PromptProgress | None = None
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._events: list[TokenEvent] = []
        self._failure: Exception | None = None
        self._is_over = False
        self._has_begun = False
        self._is_read_whole = False
        self.submitted_s = monotonic()

    @property
    def stats(self) -> Stats:
        """Counters of the generation; complete after the last event."""
        return self._generation.stats

    @property
    def age_s(self) -> float:
        """Seconds since it was submitted."""
        return monotonic() - self.submitted_s

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._generation.seed

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs, or if it failed."""
        return self._generation.finish_reason

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        """Events in order, until the generation has ended. Raises what it failed with."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            with self._lock:
                events, self._events = self._events, []
                is_over = self._is_over
            if events or self._progress is not None:
                yield events
            if is_over:
                if self._failure is not None:
                    raise self._failure
                return

    def cancel(self) -> None:
        """End it after at most one pass, or at once where it still waits. Cancelling what is over is allowed."""
        self._generation.cancel()
        self._forget(self)

    @property
    def generation(self) -> Generation:
        """What the scheduler's thread runs."""
        return self._generation

    def read_whole(self) -> None:
        """Its events are wanted when the generation has ended, all at once."""
        self._is_read_whole = True

    def take_progress(self) -> PromptProgress | None:
        """How much of the prompt is read, where that is to be told and has changed since the last call."""
        with self._lock:
            progress, self._progress = self._progress, None
        return progress

    def post_progress(self, progress: PromptProgress) -> None:
        """More of the prompt is read; called by the scheduler's thread."""
        with self._lock:
            self._progress = progress
        with suppress(RuntimeError):  # the loop is closed: nobody reads
            self.loop.call_soon_threadsafe(self._ready.set)

    def post(self, metrics: Metrics, event: TokenEvent) -> bool:
        """The next event; called by the scheduler's thread. Whether the reader is to be woken for it."""
        if not self._has_begun:
            metrics.count_first_token(self.age_s)
        self._has_begun = True
        with self._lock:
            self._events.append(event)
            is_first = len(self._events) == 1  # else the reader is being woken and has not come yet
        return is_first and not self._is_read_whole

    def end(self, failure: Exception | None = None) -> None:
        """There are no more events."""
        with self._lock:
            if not self._is_over:  # the first reason is the one to tell
                self._failure, self._is_over = failure, True
        with suppress(RuntimeError):  # the loop is closed: nobody reads
            self.loop.call_soon_threadsafe(self._ready.set)

    def wake(self) -> None:
        """Let the reader see its events; called in its loop."""
        self._ready.set()

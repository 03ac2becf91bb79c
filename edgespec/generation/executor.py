"""Owns the engines, caches and drafters of a loaded pair and runs one request at a time with them.

`begin` and `finish` must be called by the holder of the turn; `interruption` may be used from any thread.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import NamedTuple
from weakref import WeakSet

from edgespec.chat.template import answer_opening
from edgespec.config import DrafterName, LoadOptions
from edgespec.control.base import Controller
from edgespec.control.pool import DrafterPool
from edgespec.drafters.base import Drafter
from edgespec.engines.base import Engine
from edgespec.engines.parked import ParkedStates
from edgespec.engines.sequence import CachedSequence
from edgespec.engines.watch import ClassWatch
from edgespec.errors import EdgespecError, StateError
from edgespec.formats.manifest import ModelPair
from edgespec.generation.advisor import Advisor
from edgespec.generation.decode import autoregressive, speculative
from edgespec.generation.interruption import Interruption
from edgespec.generation.relief import Relief
from edgespec.generation.request import Request
from edgespec.generation.run_state import Run
from edgespec.generation.turn import Claim, Turn
from edgespec.memory.watch import MemoryReport
from edgespec.platform.machine import peak_rss_bytes
from edgespec.platform.memory import return_freed_memory
from edgespec.reports import Stats, TokenEvent
from edgespec.sampling.acceptance import RULES
from edgespec.vocabulary import Vocabulary

logger = logging.getLogger("edgespec")
_LOOK_S, _EXIT_WAIT_S = 0.1, 10.0
_open: WeakSet[Executor] = WeakSet()
Events = Generator[TokenEvent, None, None]


class _Running(NamedTuple):
    run: Run
    events: Events


class Executor:
    """The engines, caches and drafters of one loaded pair, and the queue of requests (`turn`)."""

    def __init__(
        self,
        options: LoadOptions,
        pair: ModelPair,
        target: Engine,
        drafters: dict[DrafterName, Drafter],
        memory: MemoryReport | None = None,
    ) -> None:
        """`memory`: what was planned, and the watch over it; None: nothing was planned, so nothing is watched."""
        self.turn = Turn()
        self.target = target
        self.sequence = CachedSequence(target, 0, _answer_opening(target))
        self.pool = DrafterPool(options, pair, self.sequence, drafters)
        self._places = [(self.sequence, self.pool)]
        self.advisor = Advisor(options, pair, target, self.pool)
        self.class_watch = ClassWatch()
        self.memory = memory
        self.parked = ParkedStates() if memory is None else ParkedStates(most_bytes=memory.parked_bytes)
        self._relief = None if memory is None else Relief(memory.watch, self.parked, self._drop_models)
        self.last_stats = Stats()
        self._running: _Running | None = None
        self.interruption = Interruption(target, lambda: list(self.pool.drafters.values()))
        self._num_readers, self._readers_changed = 0, threading.Condition()  # of the vocabulary, freed with the target
        _open.add(self)

    @contextmanager
    def vocabulary(self) -> Iterator[Vocabulary]:
        """The target's vocabulary, which is not freed within the block. Raises StateError if the model is closed."""
        with self._readers_changed:
            is_open = not self.turn.is_shut
            self._num_readers += is_open
        if not is_open:
            self.turn.require_open()
        try:
            yield self.target.vocabulary
        finally:
            with self._readers_changed:
                self._num_readers -= 1
                self._readers_changed.notify_all()

    @contextmanager
    def exclusive(self, max_wait_s: float | None = None) -> Iterator[DrafterPool]:
        """Exclusive use of the model for anything but a generation. Raises Busy and StateError."""
        claim = Claim()
        try:
            with self.turn.inside(claim, max_wait_s=max_wait_s):
                self._take_over(None)
                yield self.pool
        finally:
            claim.is_ended = True
            self.turn.give_back(claim)

    def begin(self, claim: Claim, request: Request, stats: Stats) -> Events:
        """The events of a generation whose claim holds the turn; `stats` is updated while they are read."""
        self._take_over(claim)
        self.last_stats = stats
        controller = self.pool.controller(request.options)
        if controller is not None:
            controller.share_passes(1, 0, 0)  # a batch may have ended in a pass of several
        run = self.run_of(request, stats, self.sequence, lambda: () if controller is None else (controller,))
        run.threads = self.pool.threads
        run.on_round = self.advisor.watching(request.options, request.on_round)
        events = autoregressive(run) if controller is None else speculative(run, controller, RULES[request.rule])
        self._running = _Running(run, events)
        return events

    def run_of(
        self, request: Request, stats: Stats, sequence: CachedSequence, controllers: Callable[[], Iterable[Controller]]
    ) -> Run:
        """The state of a generation on `sequence`; `controllers`: those in use, for when a draft model is dropped."""
        run = request.run_on(sequence, stats)
        run.parked, run.watch = self.parked, self.class_watch
        run.relieve = None if self._relief is None else partial(self._relief.relieve, controllers)
        return run

    def places(self) -> list[tuple[CachedSequence, DrafterPool]]:
        """A sequence and its drafters for each generation that can run at once; the first are those of `begin`."""
        while len(self._places) < self.target.facts.max_sequences:
            sequence = self.sequence.another(len(self._places))
            self._places.append((sequence, self.pool.another(sequence)))
        return self._places

    def _drop_models(self) -> tuple[DrafterName, ...]:
        """Close the draft models; their drafters. The first pool owns them, so it comes last."""
        with self.interruption.lock:
            return [pool.drop_models() for _, pool in reversed(self._places)][-1]

    def finish(self, claim: Claim) -> None:
        """End the generation of `claim`, finished or not: its answer is learnt, and cancelling no longer affects it."""
        if self.interruption.is_of(claim):
            self._take_over(None)

    def settle(self, claim: Claim) -> None:
        """`finish` for a generation that has given its turn back; does nothing if another one has begun."""
        if not self.interruption.is_of(claim):
            return
        own = Claim()
        try:
            with self.turn.inside(own, max_wait_s=0):
                self.finish(claim)
        except StateError:  # another turn has begun, which does the same, or the model was closed
            return
        finally:
            own.is_ended = True
            self.turn.give_back(own)

    def _take_over(self, claim: Claim | None) -> None:
        """End the previous generation, which may be unfinished, reset cancellation and make `claim` the current one."""
        running, self._running = self._running, None
        try:
            if running is not None:
                running.events.close()
                self.conclude(running.run, self.pool)
                if line := self.advisor.judged(running.run.stats):
                    running.run.stats.notes.append(line)
        finally:
            self.interruption.begin(claim)

    def conclude(self, run: Run, pool: DrafterPool) -> None:
        """A generation has ended: complete its counters and learn its answer."""
        run.stats.peak_rss_bytes = peak_rss_bytes()
        if self.memory is not None:
            run.stats.planned_bytes = self.memory.plan.total_bytes + self.parked.num_bytes
        begin = run.prompt_ids.size
        pool.learn(run.target.token_ids[begin : begin + run.stats.new_tokens])

    def forget(self) -> None:
        """Clear all caches. The caller must hold the turn."""
        self.parked.clear()
        self._empty()

    def set_aside(self) -> None:
        """Clear the caches, but keep the first one's text for its continuation. The caller must hold the turn."""
        self.parked.park(self.sequence)
        self._empty()

    def _empty(self) -> None:
        for sequence, pool in self._places:
            sequence.rollback(0)
            pool.empty()

    def close(self, *, at_exit: bool = False) -> None:
        """Cancel the running generation, wait for it, save learnt data and free everything. Closing twice is allowed.

        `at_exit`: nothing is saved, and the memory is not freed if a pass does not end in time. Raises Busy, before
        anything is done, if this thread is inside a turn.
        """
        self.turn.require_outside()
        self.turn.shut(at_exit=at_exit)
        deadline_s = monotonic() + (_EXIT_WAIT_S if at_exit else math.inf)
        while True:
            self.interruption.stop_passes()  # repeated: a generation that is just beginning resets the cancellation
            if self.turn.drain(_LOOK_S):
                break
            if monotonic() > deadline_s:
                return
        with self._readers_changed:
            left_s = None if math.isinf(deadline_s) else max(deadline_s - monotonic(), 0.0)
            if not self._readers_changed.wait_for(lambda: not self._num_readers, left_s):
                return
            if self.interruption.is_closed:
                return
            try:
                self._take_over(None)
                if not at_exit:
                    self.pool.keep()
            except OSError as exc:  # a model file was deleted meanwhile, and its identity is the key
                logger.debug("learnt data was not saved: %s", exc)
            finally:
                self._free()
                if not at_exit:
                    return_freed_memory()

    def abandon(self) -> None:
        """In a fork, where the engines' threads are missing: nothing runs any more, and nothing is freed or saved."""
        self.turn.abandon()
        self.interruption.abandon()
        self._num_readers, self._readers_changed = 0, threading.Condition()  # whoever read it is not here

    def __del__(self) -> None:
        """A model that was dropped without `close`: nobody can use it any more, and llama.cpp's memory is not Python's.

        Neither in a fork, nor where `__init__` failed, in which case the caller closes the engines.
        """
        interruption = getattr(self, "interruption", None)
        if interruption is None or interruption.is_closed or self.turn.is_shut:
            return
        try:
            with suppress(Exception):  # what an unfinished generation still wants to do
                self._take_over(None)
        finally:
            self._free()

    def _free(self) -> None:
        with self.interruption.lock:
            self.interruption.is_closed = True
        self.parked.clear()
        if self.memory is not None:
            self.memory.watch.close()
        for drafter in self.pool.drafters.values():
            drafter.close()
        self.target.close()
        _open.discard(self)


def _answer_opening(target: Engine) -> tuple[int, ...]:
    """The tokens that open an answer, if the bits of a conversation depend on where its answers are."""
    if not target.facts.prompt_block:
        return ()
    return answer_opening(target.vocabulary)


def _abandon_all() -> None:
    """Calls in a fork raise StateError instead of waiting for ever."""
    for executor in list(_open):
        executor.abandon()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


@atexit.register
def _close_all() -> None:
    """End open generations before the interpreter unloads the modules that they use. Saves nothing."""
    for executor in list(_open):
        with suppress(EdgespecError):
            executor.close(at_exit=True)

"""What a loaded model decodes with, and the one place that touches it: target, cache, drafters, parked states.

Whoever calls `begin`, `exclusive` or `finish` has the turn. `interrupt` may come from anywhere.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from weakref import WeakSet

from edgespec.acceptance import RULES
from edgespec.config import DrafterName, GenerateOptions, LoadOptions, RuleName
from edgespec.control.pool import DrafterPool
from edgespec.decode import Run, autoregressive, speculative
from edgespec.drafters.base import Drafter
from edgespec.engines.base import Engine
from edgespec.engines.machine import peak_rss_bytes
from edgespec.engines.parked import ParkedStates
from edgespec.engines.sequence import CachedSequence
from edgespec.engines.watch import ClassWatch
from edgespec.errors import EdgespecError, StateError
from edgespec.formats.manifest import ModelPair
from edgespec.generation.turn import Claim, Turn
from edgespec.sampling import Sampler
from edgespec.stopping import StopRules
from edgespec.types import RoundRecord, Stats, TokenEvent, TokenIds
from edgespec.vocabulary import Vocabulary

logger = logging.getLogger("edgespec")
_LOOK_S, _EXIT_WAIT_S = 0.1, 10.0
_open: WeakSet[Executor] = WeakSet()
Events = Generator[TokenEvent, None, None]


@dataclass(frozen=True, slots=True)
class Request:
    """One generation as it was asked for and checked. `on_round` hears of every round before its tokens are emitted."""

    prompt_ids: TokenIds
    sampler: Sampler
    options: GenerateOptions
    drafter: DrafterName
    rule: RuleName
    on_round: Callable[[RoundRecord], None] | None


@dataclass(frozen=True, slots=True)
class _Running:
    run: Run
    events: Events


class Executor:
    """Owns the engines of a loaded pair and runs one request at a time with them."""

    def __init__(
        self, options: LoadOptions, pair: ModelPair, target: Engine, drafters: dict[DrafterName, Drafter]
    ) -> None:
        self.turn = Turn()
        self.target = target
        self.sequence = CachedSequence(target)
        self.pool = DrafterPool(options, pair, self.sequence, drafters)
        self.class_watch = ClassWatch()
        self.parked = ParkedStates()
        self.last_stats = Stats()
        self._running: _Running | None = None
        self._current: Claim | None = None  # the generation that an interruption is for
        # Reentrant: a signal handler may interrupt a generation while this thread begins or ends it.
        self._interrupting = threading.RLock()
        self._reading = threading.RLock()  # of the vocabulary, which is freed with the target
        self._is_closed = False
        _open.add(self)

    @contextmanager
    def vocabulary(self) -> Iterator[Vocabulary]:
        """The target's vocabulary; it stays open within the block. Raises StateError when the model is closed."""
        with self._reading:
            if not self.turn.is_shut:
                yield self.target.vocabulary
                return
        self.turn.require_open()

    @contextmanager
    def exclusive(self) -> Iterator[DrafterPool]:
        """A turn for something that is no generation. Raises Busy, StateError."""
        claim = Claim()
        try:
            with self.turn.inside(claim):
                self._take_over(None)
                yield self.pool
        finally:
            self.turn.give_back(claim)

    def begin(self, claim: Claim, request: Request, stats: Stats) -> Events:
        """The events of a generation whose claim has the turn; `stats` fill while they are read."""
        self._take_over(claim)
        self.last_stats = stats
        controller = self.pool.controller(request.options)
        options, vocabulary = request.options, self.target.vocabulary
        run = Run(
            target=self.sequence,
            prompt_ids=request.prompt_ids,
            sampler=request.sampler,
            stop=StopRules(
                frozenset() if options.ignore_eos else vocabulary.end_ids, tuple(options.stop), options.max_tokens
            ),
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            parked=self.parked,
            watch=self.class_watch,
            threads=self.pool.threads,
            on_round=request.on_round,
            stats=stats,
        )
        events = autoregressive(run) if controller is None else speculative(run, controller, RULES[request.rule])
        self._running = _Running(run, events)
        return events

    def finish(self, claim: Claim) -> None:
        """A generation is over, early or not: what it wrote is learnt, and an interruption reaches it no more."""
        if self._current is claim:
            self._take_over(None)

    def settle(self, claim: Claim) -> None:
        """As `finish`, for a generation that gave its turn back, unless somebody has taken over meanwhile."""
        if self._current is not claim:
            return
        own = Claim()
        try:
            with self.turn.inside(own, max_wait_s=0):
                self.finish(claim)
        except StateError:  # another turn began, which takes over, or the model closed
            return
        finally:
            self.turn.give_back(own)

    def _take_over(self, claim: Claim | None) -> None:
        """End what ran, which may have been abandoned, and clear what an interruption of it left."""
        running, self._running = self._running, None
        try:
            if running is not None:
                running.events.close()
                running.run.stats.peak_rss_bytes = peak_rss_bytes()
                begin = running.run.prompt_ids.size
                self.pool.learn(self.sequence.token_ids[begin : begin + running.run.stats.new_tokens])
        finally:
            with self._interrupting:
                self._current = claim
                if not self._is_closed:
                    self.target.clear_cancel()
                    for drafter in self._drafters():
                        drafter.clear_cancel()

    def interrupt(self, claim: Claim | None = None) -> None:
        """End the running generation after at most one pass, if it is the claim's or none is named.

        May be called from any thread, or a signal handler.
        """
        with self._interrupting:
            current = self._current
            if current is None or claim not in (None, current):
                return
            current.withdraw()
            self._cancel_passes()

    def _cancel_passes(self) -> None:
        if not self._is_closed:
            self.target.cancel()
            for drafter in self._drafters():
                drafter.cancel()

    def _drafters(self) -> list[Drafter]:
        return list(self.pool.drafters.values())

    def forget(self) -> None:
        """Empty all caches. Within a turn."""
        self.parked.clear()
        self.sequence.rollback(0)
        self.pool.empty()

    def close(self, *, at_exit: bool = False) -> None:
        """End what runs, wait for it, save what was learnt and free everything. Closing twice is allowed.

        `at_exit`: nothing is saved, and a pass that does not end in time keeps its memory. Raises Busy from within a
        turn of the same thread, before anything is done.
        """
        self.turn.require_outside()
        self.turn.shut(at_exit=at_exit)
        deadline_s = monotonic() + (_EXIT_WAIT_S if at_exit else math.inf)
        while True:
            with self._interrupting:  # again and again: a generation that begins just now forgets an interruption
                self._cancel_passes()
            if self.turn.drain(_LOOK_S):
                break
            if monotonic() > deadline_s:
                return
        with self._reading:
            if self._is_closed:
                return
            try:
                self._take_over(None)
                if not at_exit:
                    self.pool.keep()
            except OSError as exc:  # a file of the model was deleted meanwhile: nothing can be kept under its name
                logger.debug("what was learnt is not kept: %s", exc)
            finally:
                self._free()

    def _free(self) -> None:
        with self._interrupting:
            self._is_closed = True
        self.parked.clear()
        for drafter in self._drafters():
            drafter.close()
        self.target.close()
        _open.discard(self)


@atexit.register
def _close_all() -> None:
    """Streams that were left open end while everything that they need is still there. Nothing is saved so late."""
    for executor in list(_open):
        with suppress(EdgespecError):
            executor.close(at_exit=True)

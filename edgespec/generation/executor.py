"""Owns the engines, caches and drafters of a loaded pair: who may use them, what ends them, and what runs on them."""

from __future__ import annotations

import atexit
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from weakref import WeakSet

from edgespec.config.options import LoadOptions
from edgespec.config.values import DrafterName
from edgespec.control.base import Controller
from edgespec.control.pool import DrafterPool
from edgespec.corpus.texts import CommonTexts
from edgespec.drafters.base import Drafter
from edgespec.engines.base import Engine
from edgespec.engines.parked import ParkedStates
from edgespec.engines.sequence import CachedSequence
from edgespec.engines.widths import ClassWatch
from edgespec.errors import EdgespecError
from edgespec.formats.manifest import ModelPair
from edgespec.generation.batching import ContinuousBatch
from edgespec.generation.request import Request
from edgespec.generation.run_state import Run
from edgespec.generation.slots import Slots
from edgespec.generation.turn import Claim, Turn
from edgespec.memory.watch import MemoryReport, Relief
from edgespec.platform.machine import peak_rss_bytes
from edgespec.platform.memory import return_freed_memory
from edgespec.reports import Stats
from edgespec.sampling.stopping import StopRules
from edgespec.vocabulary import Vocabulary

logger = logging.getLogger("edgespec")
_LOOK_S, _EXIT_WAIT_S = 0.1, 10.0
_open: WeakSet[Executor] = WeakSet()


class Executor:
    """The engines, caches and drafters of one loaded pair, the queue for them (`turn`), and what runs (`batch`)."""

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
        self.sequence = CachedSequence(target)
        self.pool = DrafterPool(options, pair, self.sequence, drafters)
        self.class_watch = ClassWatch()
        self.memory = memory
        self.parked = ParkedStates() if memory is None else ParkedStates(most_bytes=memory.parked_bytes)
        self.slots = Slots(self.sequence, self.pool, self.parked)
        self.batch = ContinuousBatch(self)
        self._relief = None if memory is None else Relief(memory.watch, self.parked, self._drop_models)
        self.last_stats = Stats()
        # Held while engines are asked to stop, and while any of them is closed. Reentrant, for signal handlers.
        self._stopping = threading.RLock()
        self._is_closed = False
        self._num_readers, self._readers_changed = 0, threading.Condition()  # of the vocabulary, freed with the target
        _open.add(self)

    @contextmanager
    def vocabulary(self) -> Iterator[Vocabulary]:
        """The target's vocabulary, which is not freed within the block. Raises StateError if the model is closed."""
        self.turn.require_open()  # before the lock, which nobody may give back in a fork
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
                self.batch.end_all()  # a handle that was dropped gave its turn back, but could not end its generation
                self.clear_cancel()
                yield self.pool
        finally:
            claim.is_over = True  # first, in case that an interrupt comes before it has left
            self.turn.leave(claim)

    def run_of(
        self, request: Request, stats: Stats, sequence: CachedSequence, controllers: Callable[[], Iterable[Controller]]
    ) -> Run:
        """The state of a generation on `sequence`; `controllers`: those in use, for when a draft model is dropped."""
        self.last_stats, options = stats, request.options
        end_ids = frozenset() if options.ignore_eos else self.target.vocabulary.end_ids
        return Run(
            target=sequence,
            prompt_ids=request.prompt_ids,
            sampler=request.sampler,
            stop=StopRules(end_ids, tuple(options.stop), options.max_tokens),
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            parked=self.parked,
            on_round=request.on_round,
            predicted_ids=request.predicted_ids,
            watch=self.class_watch,
            relieve=None if self._relief is None else partial(self._relief.relieve, controllers),
            stats=stats,
        )

    def conclude(self, run: Run, pool: DrafterPool) -> None:
        """A generation has ended: complete its counters and learn its answer."""
        run.stats.peak_rss_bytes = peak_rss_bytes()
        if self.memory is not None:
            run.stats.planned_bytes = self.memory.plan.total_bytes + self.parked.num_bytes
        begin = run.prompt_ids.size
        pool.learn(run.target.token_ids[begin : begin + run.stats.new_tokens])
        if (texts := pool.texts_to_encode()) is not None:
            threading.Thread(target=self._encode, args=(texts,), name="edgespec-texts", daemon=True).start()

    def _encode(self, texts: CommonTexts) -> None:
        """While nothing is generated: nobody should wait for it. Closing does, so that it is done once and for all."""
        with suppress(EdgespecError, MemoryError), self.vocabulary() as vocabulary:
            texts.encode(vocabulary, lambda: self.turn.num_queued > 0 and not self.turn.is_shut)
        return_freed_memory()

    def _drop_models(self) -> tuple[DrafterName, ...]:
        with self._stopping:
            return self.slots.drop_models()

    def forget(self) -> None:
        """Clear all caches. The caller must hold the turn."""
        self.parked.clear()
        self.slots.clear()

    # -- cancelling

    def clear_cancel(self) -> None:
        """Something begins: what was cancelled before no longer counts."""
        with self._stopping:
            if not self._is_closed:
                self.target.clear_cancel()
                for drafter in list(self.pool.drafters.values()):
                    drafter.clear_cancel()

    def cancel(self, claim: Claim | None = None) -> None:
        """End what runs after at most one pass; with `claim`, only if it is that claim's. For signal handlers too."""
        if self.turn.is_shut:
            return
        with self._stopping:
            running = self.batch.claims
            for each in running if claim is None else [claim]:
                self.turn.withdraw(each)
            if running and all(each.is_withdrawn for each in running):
                self._stop_passes()  # the running pass serves nobody

    def _stop_passes(self) -> None:
        """Stop the running pass of every engine, or the next one."""
        with self._stopping:
            if not self._is_closed:
                self.target.cancel()
                for drafter in list(self.pool.drafters.values()):
                    drafter.cancel()

    # -- closing

    def close(self, *, at_exit: bool = False) -> None:
        """Cancel the running generation, wait for it, save learnt data and free everything. Closing twice is allowed.

        `at_exit`: nothing is saved, and the memory is not freed if a pass does not end in time. Raises Busy, before
        anything is done, if this thread is inside a turn.
        """
        if self.turn.is_forked:
            return
        self.turn.require_outside()
        self.turn.shut(at_exit=at_exit)
        deadline_s = monotonic() + (_EXIT_WAIT_S if at_exit else math.inf)
        while True:
            self._stop_passes()  # repeated: a generation that is just beginning resets the cancellation
            if self.turn.drain(_LOOK_S):
                break
            if monotonic() > deadline_s:
                return
        with self._readers_changed:
            left_s = None if math.isinf(deadline_s) else max(deadline_s - monotonic(), 0.0)
            if not self._readers_changed.wait_for(lambda: not self._num_readers, left_s):
                return
            if self._is_closed:
                return
            try:
                self.batch.end_all()
                if not at_exit:
                    self.pool.keep()
            except OSError as exc:  # a model file was deleted meanwhile, and its identity is the key
                logger.debug("learnt data was not saved: %s", exc)
            finally:
                self._free()
                if not at_exit:
                    return_freed_memory()

    def __del__(self) -> None:
        """A model that was dropped without `close`: nobody can use it any more, and llama.cpp's memory is not Python's.

        Neither in a fork, nor where `__init__` failed, in which case the caller closes the engines.
        """
        if getattr(self, "_is_closed", True) or self.turn.is_shut:
            return
        try:
            with suppress(Exception):  # what an unfinished generation still wants to do
                self.batch.end_all()
        finally:
            self._free()

    def _free(self) -> None:
        with self._stopping:
            self._is_closed = True
        self.parked.clear()
        if self.memory is not None:
            self.memory.watch.close()
        for drafter in self.pool.drafters.values():
            drafter.close()
        self.target.close()
        _open.discard(self)


@atexit.register
def _close_all() -> None:
    """End open generations before the interpreter unloads the modules that they use. Saves nothing."""
    for executor in list(_open):
        with suppress(EdgespecError):
            executor.close(at_exit=True)

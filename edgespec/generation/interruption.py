"""Which generations `cancel` ends, and the engines whose passes it stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from edgespec.drafters.base import Drafter
from edgespec.engines.base import Engine
from edgespec.generation.turn import Claim


class Interruption:
    """The running generations of one model: a single one, or those of a batch.

    `begin`, `join` and `leave` must be called by the holder of the turn; the others may be called from any thread.
    """

    def __init__(self, target: Engine, drafters: Callable[[], Iterable[Drafter]]) -> None:
        """`drafters`: those that may run a pass now."""
        self._target, self._drafters = target, drafters
        # Held while engines are asked to stop, and while any of them is closed. Reentrant: a signal handler may cancel
        # while this thread begins or ends a generation.
        self.lock = threading.RLock()
        self._current: Claim | None = None
        self._batched: list[Claim] = []
        self.is_closed = False

    def is_of(self, claim: Claim) -> bool:
        """Whether `claim` has the single generation that runs."""
        return self._current is claim

    def begin(self, claim: Claim | None) -> None:
        """`claim` runs alone from now on, or nobody; what was cancelled before no longer counts."""
        with self.lock:
            self._current = claim
            if not self.is_closed:
                self._target.clear_cancel()
                for drafter in self._drafters():
                    drafter.clear_cancel()

    def join(self, claim: Claim) -> None:
        """A generation of a batch begins."""
        with self.lock:
            self._batched.append(claim)
            self._target.clear_cancel()

    def leave(self, claim: Claim) -> None:
        """A generation of a batch has ended, perhaps by an interrupt before it joined."""
        with self.lock:
            if claim in self._batched:
                self._batched.remove(claim)

    def interrupt(self, claim: Claim | None = None) -> None:
        """End what runs after at most one pass; with `claim`, only if it is that claim's. For signal handlers too."""
        with self.lock:
            for batched in self._batched if claim is None else ():
                batched.withdraw()
            if self._batched and all(batched.is_withdrawn for batched in self._batched):
                self._target.cancel()  # the running pass serves nobody
            current = self._current
            if current is not None and claim in (None, current):
                current.withdraw()
                self.stop_passes()

    def stop_passes(self) -> None:
        """Stop the running pass of every engine, or the next one."""
        with self.lock:
            if not self.is_closed:
                self._target.cancel()
                for drafter in self._drafters():
                    drafter.cancel()

    def abandon(self) -> None:
        """In a fork: there is nothing to stop, and whoever held the lock is not here."""
        self.is_closed, self.lock = True, threading.RLock()

"""The queue of requests to one loaded model: one claim at a time has the turn, first come, first served.

A claim joins the queue when it first asks for the turn, and has it from when it is first until it leaves. Finalisers
and signal handlers may withdraw a claim or let it leave: the lock is reentrant and never held for long.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from edgespec.errors import Busy, StateError

# After it, whoever waits for a generation that nobody reads is told so: it may be the caller's own, and never end.
IDLE_S = 5.0
CLOSED = "this model is closed: load it again"
FORKED = (
    "this model was loaded before the process was forked, and the threads that compute its passes are not in the fork: "
    "load it in the process that uses it, such as after the server has started its workers"
)


@dataclass(eq=False, slots=True)
class Claim:
    """One request's place in the queue.

    `inside`: the thread that uses the model with it; `has_begun`: it had the turn, last until `used_s`;
    `is_withdrawn`: cancelled, so that waiting for the turn ends; `is_over`: it never joins the queue again.
    """

    inside: threading.Thread | None = None
    has_begun: bool = False
    used_s: float = 0.0
    is_withdrawn: bool = False
    is_over: bool = False

    @property
    def needs_turn(self) -> bool:
        return not self.is_withdrawn and not self.is_over


class Turn:
    """The queue of claims to one model. The first claim has the turn."""

    def __init__(self) -> None:
        self._queue: list[Claim] = []
        self._changed = threading.Condition()
        self._is_shut = self.is_exiting = False
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork: threads that hold its locks, and those of the engines, are not here."""
        return os.getpid() != self._process

    @property
    def is_shut(self) -> bool:
        """Whether nothing can run any more."""
        return self._is_shut or self.is_forked

    @property
    def num_queued(self) -> int:
        """Claims that have the turn or wait for it."""
        return len(self._queue)

    def is_of(self, claim: Claim) -> bool:
        """Whether `claim` has the turn."""
        return self.first is claim

    @contextmanager
    def inside(self, claim: Claim, max_wait_s: float | None = None) -> Iterator[None]:
        """Wait for the claim's turn and use the model exclusively within the block. The turn is kept afterwards.

        A withdrawn claim, or one that is over, enters without the turn and must not use the model. Raises Busy if the
        turn does not come within `max_wait_s`, if without that it belongs to a generation that nobody reads for IDLE_S,
        and if this thread is inside it with another claim, so that it can never come; StateError if the model was
        closed.
        """
        thread = threading.current_thread()
        self.require_open()
        if claim.inside is thread:
            raise Busy("a generation cannot be read inside its own on_round callback, or a signal handler during it")
        began_s = monotonic()
        try:
            with self._changed:
                if claim not in self._queue and claim.needs_turn and not self._is_shut:
                    self._queue.append(claim)
                while not self._is_shut and not self._may_enter(claim):
                    self._changed.wait(self._next_check_s(claim, began_s, max_wait_s))
                if not self._is_shut:
                    claim.inside, claim.has_begun = thread, True
            self.require_open()
        except BaseException:
            if not (self.is_of(claim) and claim.has_begun):  # it keeps its turn
                self.leave(claim)
            raise
        try:
            yield
        finally:
            claim.inside, claim.used_s = None, monotonic()
            with self._changed:
                self._changed.notify_all()

    def leave(self, claim: Claim, *, for_good: bool = False) -> None:
        """Leave the queue, so that the next claim has the turn; `for_good`: this one needs none any more."""
        claim.is_over = claim.is_over or for_good
        if self.is_forked:
            return
        with self._changed:
            if claim in self._queue:
                self._queue.remove(claim)
            self._changed.notify_all()

    def withdraw(self, claim: Claim) -> None:
        """Cancel the claim: it waits no longer."""
        with self._changed:
            claim.is_withdrawn = True
            self._changed.notify_all()

    def shut(self, *, at_exit: bool = False) -> None:
        """Withdraw all claims; every later call and every waiter raises StateError.

        `at_exit`: daemon threads, which end with the program, block instead of raising.
        """
        with self._changed:
            self.is_exiting, self._is_shut = at_exit, True
            for claim in list(self._queue):
                claim.is_withdrawn = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """After `shut`: wait until no thread uses the model. Returns False if one still does after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: all(claim.inside is None for claim in list(self._queue)), timeout_s)

    def require_open(self) -> None:
        """Raise StateError if shut, or in a fork. At exit, a daemon thread blocks forever instead."""
        if self.is_forked:
            raise StateError(FORKED)
        if not self._is_shut:
            return
        if self.is_exiting and threading.current_thread().daemon:
            threading.Event().wait()
        raise StateError(CLOSED)

    def require_outside(self) -> None:
        """Raise Busy if this thread is inside a turn: waiting for that turn to end would deadlock."""
        if any(claim.inside is threading.current_thread() for claim in list(self._queue)):
            raise Busy(
                "the model cannot be closed inside on_round or a signal handler that interrupted a generation: "
                "call cancel() there"
            )

    @property
    def first(self) -> Claim | None:
        """The claim that has the turn; one that an interrupt kept from leaving is passed over."""
        return next((claim for claim in list(self._queue) if not claim.is_over or claim.inside is not None), None)

    def _may_enter(self, claim: Claim) -> bool:
        return claim.inside is None and (self.is_of(claim) or not claim.needs_turn)

    def _next_check_s(self, claim: Claim, began_s: float, max_wait_s: float | None) -> float:
        """How long to wait on, in a wait since `began_s`. Raises Busy where it lasts too long, or would for ever."""
        first, now_s = self.first, monotonic()
        if first is not None and first.inside is threading.current_thread():
            raise Busy("the model cannot be called inside on_round, or a signal handler during a generation")
        if max_wait_s is not None:
            if now_s >= began_s + max_wait_s:
                raise Busy(f"another generation is still running after the wait limit of {max_wait_s:g} s")
            return max(min(IDLE_S / 4, began_s + max_wait_s - now_s), 0.001)
        is_idle = first is not None and first is not claim and first.has_begun and first.inside is None
        if first is not None and is_idle and now_s >= max(first.used_s, began_s) + IDLE_S:
            raise Busy(
                f"an unfinished generation of this model is not read for {IDLE_S:g} s, so waiting may never end: read "
                "it to its end, close() it, wait with max_wait_s, or load the model twice"
            )
        return IDLE_S / 4

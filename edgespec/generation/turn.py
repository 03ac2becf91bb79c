"""The queue of requests to one loaded model: one claim at a time has the turn, first come, first served.

A claim joins the queue when it first asks for the turn, and has it from when it is first until it leaves. Finalisers
and signal handlers may withdraw a claim or let it leave: the lock is reentrant and never held for long.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from edgespec.errors import Busy, StateError

if TYPE_CHECKING:
    import asyncio

GRACE_S = 1.0  # a caller that waits for its own idle generation raises Busy after this time
CLOSED = "this model is closed: load it again"
FORKED = (
    "this model was loaded before the process was forked, and the threads that compute its passes are not in the fork: "
    "load it in the process that uses it, such as after the server has started its workers"
)
_OWN = "has an unfinished generation of the same model, so waiting would deadlock"
_FIX = "read it to its end, close() it, or load the model twice"


class Caller(NamedTuple):
    """The thread of a call, and the asyncio task that runs in it, if any."""

    thread: threading.Thread
    task: asyncio.Task[Any] | None

    @classmethod
    def now(cls) -> Self:
        loaded = sys.modules.get("asyncio")  # without asyncio loaded there are no tasks, and importing it takes 30 ms
        task = None
        with suppress(RuntimeError):  # no event loop runs in this thread
            task = None if loaded is None else loaded.current_task()
        return cls(threading.current_thread(), task)

    @property
    def waits_with_thread(self) -> bool:
        """Whether it waits in its own thread, and not in one that waits for its task."""
        return self.thread is threading.current_thread()


@dataclass(eq=False, slots=True)
class Claim:
    """One request's place in the queue.

    `caller`: who used it last, until `used_s`; `inside`: the thread that uses the model with it; `is_withdrawn`:
    cancelled, so that waiting for the turn ends; `is_over`: it never joins the queue again.
    """

    caller: Caller | None = None
    inside: threading.Thread | None = None
    used_s: float = 0.0
    is_withdrawn: bool = False
    is_over: bool = False

    @property
    def needs_turn(self) -> bool:
        return not self.is_withdrawn and not self.is_over

    def waits_for(self, caller: Caller) -> bool:
        """Whether only `caller`, which waits, would use it next: its task, or all of its thread where that waits."""
        if self.caller is None:
            return False
        if caller.waits_with_thread:
            return self.caller.thread is caller.thread
        return self.caller.task is not None and self.caller.task is caller.task


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
    def inside(self, claim: Claim, caller: Caller | None = None, max_wait_s: float | None = None) -> Iterator[None]:
        """Wait for the claim's turn and use the model exclusively within the block. The turn is kept afterwards.

        A withdrawn claim, or one that is over, enters without the turn and must not use the model. Raises Busy if the
        turn does not come within `max_wait_s`, or never can because this caller holds it with another claim; StateError
        if the model was closed.
        """
        thread = threading.current_thread()
        self.require_open()
        if claim.inside is thread:
            raise Busy("a generation cannot be read inside its own on_round callback, or a signal handler during it")
        caller = caller or Caller.now()
        began_s = monotonic()
        try:
            with self._changed:
                if claim not in self._queue and claim.needs_turn and not self._is_shut:
                    self._queue.append(claim)
                while not self._is_shut and not self._may_enter(claim):
                    self._changed.wait(self._next_check_s(claim, caller, began_s, max_wait_s))
                if not self._is_shut:
                    claim.inside, claim.caller = thread, caller
            self.require_open()
        except BaseException:
            if not (self.is_of(claim) and claim.caller is not None):  # one that has begun keeps its turn
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

    def _next_check_s(self, claim: Claim, caller: Caller, began_s: float, max_wait_s: float | None) -> float:
        """How long to wait on, in a wait since `began_s`. Raises Busy where it lasts too long, or would for ever:
        the caller has the turn itself, with another claim.
        """
        first, now_s = self.first, monotonic()
        if first is not None and first is not claim and first.waits_for(caller):
            if first.inside is caller.thread:
                raise Busy("the model cannot be called inside on_round, or a signal handler during a generation")
            if now_s >= max(first.used_s, began_s) + GRACE_S:  # another thread of a pool may have taken a step
                raise Busy(f"this {'thread' if caller.waits_with_thread else 'task'} {_OWN}: {_FIX}")
        if max_wait_s is None:
            return GRACE_S / 4
        if now_s >= began_s + max_wait_s:
            raise Busy(f"another generation is still running after the wait limit of {max_wait_s:g} s")
        return max(min(GRACE_S / 4, began_s + max_wait_s - now_s), 0.001)

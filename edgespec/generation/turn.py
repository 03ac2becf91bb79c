"""The queue of requests to one loaded model: one claim at a time has the turn, first come, first served.

A claim joins the queue when it first asks for the turn. The first claim in the queue has the turn until it is given
back. `give_back` and `Claim.withdraw` may be called by finalisers and signal handlers, so they take no lock: each is
atomic in the interpreter, and a waiter that misses its wake-up checks again within a second.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from edgespec.errors import Busy, StateError
from edgespec.generation.wait_limit import WaitLimit

if TYPE_CHECKING:
    import asyncio

_DRAIN_LOOK_S = 0.002
CLOSED = "this model is closed: load it again"
FORKED = (
    "this model was loaded before the process was forked, and the threads that compute its passes are not in the fork: "
    "load it in the process that uses it, such as after the server has started its workers"
)


class Caller(NamedTuple):
    """The thread of a call, and the asyncio task that runs in it, if any."""

    thread: threading.Thread
    task: asyncio.Task[Any] | None

    @classmethod
    def now(cls) -> Self:
        return cls(threading.current_thread(), _current_task())

    def waits_for_itself(self, other: Caller, *, blocks_thread: bool) -> bool:
        """Whether `other` cannot proceed while this caller waits: same thread, or same task if waiting is async."""
        if blocks_thread:
            return other.thread is self.thread
        return other.task is not None and other.task is self.task


def _current_task() -> asyncio.Task[Any] | None:
    loaded = sys.modules.get("asyncio")  # without asyncio loaded there are no tasks, and importing it takes 30 ms
    if loaded is None:
        return None
    try:
        task: asyncio.Task[Any] | None = loaded.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
    return task


@dataclass(eq=False, slots=True)
class Claim:
    """One request's place in the queue.

    `caller`: the latest caller; `inside`: the thread that uses the model with this claim, or is blocked waiting to;
    `num_steps`: number of uses so far; `is_withdrawn`: cancelled, so waiting for the turn ends; `is_ended`: it never
    joins again, so that a second reader, who waited for its last step, does not bring it back into the queue. Whoever
    is done with the turn sets it before leaving the queue, in the same breath: where an interrupt comes between the
    two, the claim behind removes it.
    """

    caller: Caller | None = None
    inside: threading.Thread | None = None
    num_steps: int = 0
    is_withdrawn: bool = False
    is_ended: bool = False
    step: threading.RLock = field(default_factory=threading.RLock)  # held while waiting for the turn or using it
    wake: Callable[[], None] = field(default=lambda: None)

    def withdraw(self) -> None:
        """Cancel the claim. May be called from any thread, a finaliser or a signal handler."""
        self.is_withdrawn = True
        self.wake()


class Turn:
    """The queue of claims to one model. The first claim has the turn."""

    def __init__(self) -> None:
        self._queue: deque[Claim] = deque()
        self._joining = threading.Lock()
        self.is_shut = self.is_exiting = False
        self._reason = CLOSED

    @property
    def num_queued(self) -> int:
        """Claims that have the turn or wait for it."""
        return len(self._queue)

    def is_of(self, claim: Claim) -> bool:
        """Whether `claim` has the turn."""
        while True:
            try:
                first = self._queue[0]
            except IndexError:
                return False
            if first is claim or not first.is_ended or first.inside is not None:
                return first is claim
            self.give_back(first)  # an interrupt came before it left

    def inside(self, claim: Claim, caller: Caller | None = None, max_wait_s: float | None = None) -> _Inside:
        """Wait for the claim's turn and use the model exclusively within the block. The turn is kept afterwards.

        A withdrawn or ended claim enters without the turn and must not use the model. Raises Busy if the turn does not
        come within `max_wait_s`, or never can because this caller holds it with another claim; StateError if the model
        was closed.
        """
        return _Inside(self, claim, caller or Caller.now(), max_wait_s)

    def take(self, claim: Claim, caller: Caller, max_wait_s: float | None) -> None:
        """Wait for the turn as `inside` does. The caller must hold the claim's step lock."""
        if self.is_of(claim) and not self.is_shut:  # all steps after the first
            claim.caller = caller
            return
        limit = WaitLimit(self, claim, caller, max_wait_s, blocks_thread=True)
        gate = threading.Lock()
        gate.acquire()
        claim.wake = lambda: _open(gate)
        try:
            self._join(claim, caller)
            while not limit.is_over():
                gate.acquire(timeout=limit.next_look_s)
        except BaseException:
            self._leave_unless_first(claim)
            raise

    async def wait(self, claim: Claim, caller: Caller, max_wait_s: float | None = None) -> None:
        """Wait as `inside` does without blocking the event loop, until the claim has the turn or needs it no longer."""
        import asyncio

        limit = WaitLimit(self, claim, caller, max_wait_s, blocks_thread=False)
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        claim.wake = lambda: _call_soon(loop, woken.set)
        try:
            self._join(claim, caller)
            while not limit.is_over():
                woken.clear()
                if self.is_of(claim) or claim.is_withdrawn or claim.is_ended:
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), limit.next_look_s)
        except BaseException:
            self._leave_unless_first(claim)
            raise

    def give_back(self, claim: Claim) -> None:
        """Leave the queue and wake the next claim. May be called from any thread, and more than once."""
        try:
            self._queue.remove(claim)
        except ValueError:
            return
        try:
            self._queue[0].wake()
        except IndexError:
            return

    def end(self, claim: Claim) -> None:
        """`give_back` for good: the claim needs no turn any more."""
        claim.is_ended = True  # first: who then finds it gone from the queue must not add it
        self.give_back(claim)

    def shut(self, *, at_exit: bool = False) -> None:
        """Withdraw all claims; every later call and every waiter raises StateError.

        `at_exit`: daemon threads, which end with the program, block instead of raising.
        """
        self.is_exiting = at_exit
        self.is_shut = True
        for claim in tuple(self._queue):
            claim.withdraw()

    def require_open(self, claim: Claim | None = None) -> None:
        """Raise StateError if shut. At exit, a daemon thread leaves `claim` and blocks forever instead."""
        if not self.is_shut:
            return
        if self.is_exiting and threading.current_thread().daemon:
            if claim is not None:
                claim.inside = None
            threading.Event().wait()
        raise StateError(self._reason)

    def abandon(self) -> None:
        """In a fork: shut, and forget claims of threads that are not in it."""
        self._reason, self.is_shut = FORKED, True
        self._queue.clear()
        self._joining = threading.Lock()  # whoever held it is not here

    def drain(self, timeout_s: float) -> bool:
        """After `shut`: wait until no thread uses the model. Returns False if one still does after `timeout_s`."""
        deadline_s = monotonic() + timeout_s
        while any(claim.inside is not None for claim in tuple(self._queue)):
            if monotonic() > deadline_s:
                return False
            sleep(_DRAIN_LOOK_S)
        return True

    def require_outside(self) -> None:
        """Raise Busy if this thread is inside a turn: waiting for that turn to end would deadlock."""
        thread = threading.current_thread()
        if any(claim.inside is thread for claim in tuple(self._queue)):
            raise Busy(
                "the model cannot be closed inside on_round or a signal handler that interrupted a generation: "
                "call cancel() there"
            )

    def ahead_of(self, claim: Claim) -> list[Claim]:
        """Claims before this one in the queue."""
        queue = tuple(self._queue)
        return list(queue[: queue.index(claim)]) if claim in queue else []

    def _join(self, claim: Claim, caller: Caller) -> None:
        claim.caller = caller
        with self._joining:
            if claim not in self._queue and not claim.is_withdrawn and not claim.is_ended:
                self._queue.append(claim)

    def _leave_unless_first(self, claim: Claim) -> None:
        """Leave the queue after a failed wait; a generation that has begun keeps its turn."""
        if not (self.is_of(claim) and claim.num_steps):
            self.give_back(claim)


class _Inside:
    """The context manager of `Turn.inside`; a class, which is faster than contextlib, since every token enters one."""

    __slots__ = ("_caller", "_claim", "_max_wait_s", "_turn")

    def __init__(self, turn: Turn, claim: Claim, caller: Caller, max_wait_s: float | None) -> None:
        self._turn, self._claim, self._caller, self._max_wait_s = turn, claim, caller, max_wait_s

    def __enter__(self) -> None:
        claim, thread = self._claim, threading.current_thread()
        if claim.inside is thread:
            raise Busy("a generation cannot be read inside its own on_round callback, or a signal handler during it")
        try:
            claim.step.acquire()
            claim.inside = thread
            self._turn.take(claim, self._caller, self._max_wait_s)
            claim.num_steps += 1
        except BaseException:
            if claim.inside is thread:
                claim.inside = None
            with suppress(RuntimeError):  # interrupted before the lock was acquired
                claim.step.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._claim.inside = None
        self._claim.step.release()


def _open(gate: threading.Lock) -> None:
    try:
        gate.release()
    except RuntimeError:  # already open
        return


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop is closed, so nothing waits
        return

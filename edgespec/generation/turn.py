"""Whose turn it is: one claim at a time uses a loaded model, first come, first served. Knows no engine.

A claim is queued when its turn is first asked for, and the first of the queue has the turn until it is given back. What
finalisers and signal handlers call (`give_back`, `Claim.withdraw`) takes no lock: each is a step that the interpreter
does not interrupt, and a waiter that misses being woken looks again within a second.
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

if TYPE_CHECKING:
    import asyncio

GRACE_S = 1.0  # how long a turn that this very caller has may stand still before waiting for it is given up
_DRAIN_LOOK_S = 0.002
CLOSED = "this model is closed: load it again"
_FIX = "read it to its end, close() it, or load the model twice"


class Caller(NamedTuple):
    """Who asks: a thread, and the asyncio task that runs in it, if there is one."""

    thread: threading.Thread
    task: asyncio.Task[Any] | None

    @classmethod
    def now(cls) -> Self:
        return cls(threading.current_thread(), _current_task())

    def waits_for_itself(self, other: Caller, *, blocks_thread: bool) -> bool:
        """Whether `other` cannot go on while this one waits, in its thread or, if that goes on, in its task."""
        if blocks_thread:
            return other.thread is self.thread
        return other.task is not None and other.task is self.task


def _current_task() -> asyncio.Task[Any] | None:
    loaded = sys.modules.get("asyncio")  # a program without it has no tasks, and importing it takes 30 ms
    if loaded is None:
        return None
    try:
        found: asyncio.Task[Any] | None = loaded.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
    return found


@dataclass(eq=False, slots=True)
class Claim:
    """One request's place in the queue, later its turn.

    `caller`: who asked for it last; `inside`: the thread that uses the model under it now, or is blocked until it may;
    `num_steps`: such uses so far; `is_withdrawn`: nobody wants the turn any longer, so who waits for it stops waiting.
    """

    caller: Caller | None = None
    inside: threading.Thread | None = None
    num_steps: int = 0
    is_withdrawn: bool = False
    step: threading.RLock = field(default_factory=threading.RLock)  # held while somebody waits for or uses the turn
    wake: Callable[[], None] = field(default=lambda: None)

    def withdraw(self) -> None:
        """May be called from any thread, a finaliser or a signal handler."""
        self.is_withdrawn = True
        self.wake()


class Turn:
    """The queue of claims to one model; its first claim has the turn."""

    def __init__(self) -> None:
        self._queue: deque[Claim] = deque()
        self._joining = threading.Lock()
        self.is_shut = self.is_exiting = False

    def is_of(self, claim: Claim) -> bool:
        """Whether it is this claim's turn."""
        return bool(self._queue) and self._queue[0] is claim

    def inside(self, claim: Claim, caller: Caller | None = None, max_wait_s: float | None = None) -> _Inside:
        """Wait for the claim's turn and use the model within the block, alone; the turn is kept afterwards.

        A claim that is withdrawn enters without a turn, and must not use the model. Raises Busy when the turn cannot
        come (this very caller has it with another claim) or not within `max_wait_s`, StateError when the model closed.
        """
        return _Inside(self, claim, caller or Caller.now(), max_wait_s)

    def take(self, claim: Claim, caller: Caller, max_wait_s: float | None) -> None:
        """Wait as `inside` says, the claim's step lock being held."""
        if self.is_of(claim) and not self.is_shut:  # every step but the first
            claim.caller = caller
            return
        patience = _Patience(self, claim, caller, max_wait_s, blocks_thread=True)
        gate = threading.Lock()
        gate.acquire()
        claim.wake = lambda: _open(gate)
        try:
            self._join(claim, caller)
            while not patience.is_over():
                gate.acquire(timeout=patience.next_look_s)
        except BaseException:
            self._leave_unless_first(claim)
            raise

    async def wait(self, claim: Claim, caller: Caller, max_wait_s: float | None = None) -> None:
        """As `inside` waits, without blocking the event loop; the turn is there or the claim withdrawn afterwards."""
        import asyncio

        patience = _Patience(self, claim, caller, max_wait_s, blocks_thread=False)
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        claim.wake = lambda: _call_soon(loop, woken.set)
        try:
            self._join(claim, caller)
            while not patience.is_over():
                woken.clear()
                if self.is_of(claim) or claim.is_withdrawn:
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), patience.next_look_s)
        except BaseException:
            self._leave_unless_first(claim)
            raise

    def give_back(self, claim: Claim) -> None:
        """Leave the queue; the next one's turn begins. May be called from anywhere, and more than once."""
        try:
            self._queue.remove(claim)
        except ValueError:
            return
        try:
            self._queue[0].wake()
        except IndexError:
            return

    def shut(self, *, at_exit: bool = False) -> None:
        """No turn begins any more: whoever waits, or comes later, meets StateError.

        `at_exit`: but daemon threads, which end with the program, stand still instead of telling of it.
        """
        self.is_exiting = at_exit
        self.is_shut = True
        for claim in tuple(self._queue):
            claim.withdraw()

    def require_open(self, claim: Claim | None = None) -> None:
        """Raises StateError when it is shut; at exit, a daemon thread never comes back, outside of `claim`."""
        if not self.is_shut:
            return
        if self.is_exiting and threading.current_thread().daemon:
            if claim is not None:
                claim.inside = None
            threading.Event().wait()
        raise StateError(CLOSED)

    def drain(self, timeout_s: float) -> bool:
        """After `shut`: wait until nobody is inside. False when somebody still is after `timeout_s`."""
        deadline_s = monotonic() + timeout_s
        while any(claim.inside is not None for claim in tuple(self._queue)):
            if monotonic() > deadline_s:
                return False
            sleep(_DRAIN_LOOK_S)
        return True

    def require_outside(self) -> None:
        """Raises Busy when this thread is inside a turn, and so can neither wait for its end nor close the model."""
        thread = threading.current_thread()
        if any(claim.inside is thread for claim in tuple(self._queue)):
            raise Busy("the model is in use by this very thread (an on_round callback or a signal handler): cancel()")

    def ahead_of(self, claim: Claim) -> list[Claim]:
        """Those whose turn comes before the claim's."""
        queue = tuple(self._queue)
        return list(queue[: queue.index(claim)]) if claim in queue else []

    def _join(self, claim: Claim, caller: Caller) -> None:
        claim.caller = caller
        with self._joining:
            if claim not in self._queue and not claim.is_withdrawn:
                self._queue.append(claim)

    def _leave_unless_first(self, claim: Claim) -> None:
        """Who gave up waiting leaves the queue; a generation that has begun keeps its turn."""
        if not (self.is_of(claim) and claim.num_steps):
            self.give_back(claim)


class _Inside:
    """What `Turn.inside` gives: a context manager, spelled out since every token passes through one."""

    __slots__ = ("_caller", "_claim", "_max_wait_s", "_turn")

    def __init__(self, turn: Turn, claim: Claim, caller: Caller, max_wait_s: float | None) -> None:
        self._turn, self._claim, self._caller, self._max_wait_s = turn, claim, caller, max_wait_s

    def __enter__(self) -> None:
        claim, thread = self._claim, threading.current_thread()
        if claim.inside is thread:
            raise Busy("a generation was asked for more from within its own step (on_round, or a signal handler)")
        try:
            claim.step.acquire()
            claim.inside = thread
            self._turn.take(claim, self._caller, self._max_wait_s)
            claim.num_steps += 1
        except BaseException:
            if claim.inside is thread:
                claim.inside = None
            with suppress(RuntimeError):  # an interruption came before it was held
                claim.step.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._claim.inside = None
        self._claim.step.release()


class _Patience:
    """How long one claim waits: until its turn comes, it is withdrawn, or waiting has no sense."""

    def __init__(
        self, turn: Turn, claim: Claim, caller: Caller, max_wait_s: float | None, *, blocks_thread: bool
    ) -> None:
        self._turn, self._claim, self._caller, self._blocks_thread = turn, claim, caller, blocks_thread
        self._max_wait_s, self._began_s = max_wait_s, monotonic()
        self._seen: tuple[Claim, int] | None = None  # what stood still, and after how many steps
        self._seen_s = 0.0

    @property
    def next_look_s(self) -> float:
        """Seconds until it is worth looking again; waking may come earlier."""
        if self._max_wait_s is None:
            return GRACE_S
        return max(min(GRACE_S, self._began_s + self._max_wait_s - monotonic()), 0.001)

    def is_over(self) -> bool:
        """Whether the turn has come or nobody wants it. Raises Busy, StateError."""
        self._turn.require_open(self._claim)
        if self._claim.is_withdrawn or self._turn.is_of(self._claim):
            return True
        self._look_for_itself()
        if self._max_wait_s is not None and monotonic() >= self._began_s + self._max_wait_s:
            raise Busy(f"another generation is running, and waiting longer than {self._max_wait_s:g} s is not wanted")
        return False

    def _look_for_itself(self) -> None:
        """Raises Busy when one ahead can only go on if this caller does, and did not for a while.

        Not at once: in a pool of threads the next step of a generation may come from another one.
        """
        for claim in self._turn.ahead_of(self._claim):
            other = claim.caller
            if other is None or not self._caller.waits_for_itself(other, blocks_thread=self._blocks_thread):
                continue
            if claim.inside is self._caller.thread:
                raise Busy("the model was asked for a turn from within a running step (on_round, or a signal handler)")
            if claim.inside is None:
                self._stands_still(claim)
                return
        self._seen = None

    def _stands_still(self, claim: Claim) -> None:
        if self._seen != (claim, claim.num_steps):
            self._seen, self._seen_s = (claim, claim.num_steps), monotonic()
        elif monotonic() >= self._seen_s + GRACE_S:
            who = "thread" if self._blocks_thread else "task"
            raise Busy(f"this {who} has an unfinished generation of the same model, so waiting would not end: {_FIX}")


def _open(gate: threading.Lock) -> None:
    try:
        gate.release()
    except RuntimeError:  # it is open
        return


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop is closed: nobody waits
        return

"""How long a claim waits for its turn: until it has it, needs it no longer, has waited too long, or would deadlock."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from edgespec.errors import Busy

if TYPE_CHECKING:
    from edgespec.generation.turn import Caller, Claim, Turn

GRACE_S = 1.0  # a caller that waits for its own idle generation raises Busy after this time
_FIX = "read it to its end, close() it, or load the model twice"


class WaitLimit:
    """Decides when one claim stops waiting: it has the turn, needs none, has waited too long, or would deadlock."""

    def __init__(
        self, turn: Turn, claim: Claim, caller: Caller, max_wait_s: float | None, *, blocks_thread: bool
    ) -> None:
        self._turn, self._claim, self._caller, self._blocks_thread = turn, claim, caller, blocks_thread
        self._max_wait_s, self._began_s = max_wait_s, monotonic()
        self._seen: tuple[Claim, int] | None = None  # (idle claim of this caller, its number of steps)
        self._seen_s = 0.0

    @property
    def next_look_s(self) -> float:
        """Seconds until the next check; a wake-up may come earlier."""
        if self._max_wait_s is None:
            return GRACE_S
        return max(min(GRACE_S, self._began_s + self._max_wait_s - monotonic()), 0.001)

    def is_over(self) -> bool:
        """Whether the claim has the turn, or needs it no longer. Raises Busy and StateError."""
        self._turn.require_open(self._claim)
        if self._claim.is_withdrawn or self._claim.is_ended or self._turn.is_of(self._claim):
            return True
        self._check_deadlock()
        if self._max_wait_s is not None and monotonic() >= self._began_s + self._max_wait_s:
            raise Busy(f"another generation is still running after the wait limit of {self._max_wait_s:g} s")
        return False

    def _check_deadlock(self) -> None:
        """Raise Busy if a claim ahead is idle and only this caller can advance it, so that waiting would deadlock.

        Only after GRACE_S: with a thread pool, another thread may take the next step of that generation.
        """
        for claim in self._turn.ahead_of(self._claim):
            other = claim.caller
            if other is None or not self._caller.waits_for_itself(other, blocks_thread=self._blocks_thread):
                continue
            if claim.inside is self._caller.thread:
                raise Busy("the model cannot be called inside on_round, or a signal handler during a generation")
            if claim.inside is None:
                self._check_idle(claim)
                return
        self._seen = None

    def _check_idle(self, claim: Claim) -> None:
        if self._seen != (claim, claim.num_steps):
            self._seen, self._seen_s = (claim, claim.num_steps), monotonic()
        elif monotonic() >= self._seen_s + GRACE_S:
            who = "thread" if self._blocks_thread else "task"
            raise Busy(f"this {who} has an unfinished generation of the same model, so waiting would deadlock: {_FIX}")

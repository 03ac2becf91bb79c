"""What a loaded pair was planned to take, what it takes, and what was given up for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.memory.fit import Fitted, GivenUp
from edgespec.memory.plan import Plan
from edgespec.memory.verdict import Room, Verdict
from edgespec.memory.watch import MemoryWatch
from edgespec.platform.machine import peak_rss_bytes
from edgespec.platform.memory import own_bytes


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """`plan` and `verdict` of the load, what was `given_up`, and the `watch` that keeps the budget.

    `parked_bytes`: room for saved states of other conversations, beyond the plan.
    """

    plan: Plan
    verdict: Verdict
    given_up: tuple[GivenUp, ...]
    watch: MemoryWatch
    parked_bytes: int
    note: str

    @classmethod
    def of(cls, fitted: Fitted, room: Room) -> MemoryReport:
        from edgespec.engines.parked import MOST_BYTES  # imports numpy, which a plan alone does without

        most = room.most_own(fitted.plan)
        counted = min(room.own, fitted.plan.process.own)
        left = MOST_BYTES if most is None else most - room.own - fitted.plan.own_bytes + counted
        parked = min(max(left, 0), MOST_BYTES)
        planned = fitted.plan.own_bytes - fitted.plan.process.own
        grows_to = room.own - counted + fitted.plan.own_bytes
        watch = MemoryWatch(room.most_in_budget(fitted.plan), planned_bytes=planned, grows_to_bytes=grows_to)
        return cls(fitted.plan, fitted.verdict, fitted.given_up, watch, parked, fitted.note)

    @property
    def own_bytes(self) -> int | None:
        """The process's own memory now, without files; None if the system does not report it."""
        return own_bytes()

    @property
    def peak_rss_bytes(self) -> int:
        """The most memory that the process ever had, mapped files included."""
        return peak_rss_bytes()


def plan_object(fitted: Fitted) -> dict[str, Any]:
    """A plan as JSON; sizes in bytes."""
    plan, verdict = fitted.plan, fitted.verdict
    return {
        "model": plan.name,
        "verdict": verdict.fit,
        "needed_bytes": verdict.needed_bytes,
        "free_bytes": verdict.free_bytes,
        "limit": verdict.name,
        "own_bytes": plan.own_bytes,
        "mapped_bytes": plan.mapped_bytes,
        "total_bytes": plan.total_bytes,
        "read_once_bytes": plan.read_once_bytes,
        "device_bytes": plan.device_bytes,
        "device_note": plan.device_note,
        "context_length": plan.context_length,
        "given_up": [{"what": each.what, "text": each.text, "flags": each.flags} for each in fitted.given_up],
        "parts": [part._asdict() for part in plan.parts],
    }

"""Keeps loaded pairs within their budgets: checks the process's own memory once a second, between rounds.

Where the budget is exceeded, saved states are freed first, then draft models, never the target. A report says
what a loaded pair was planned to take, what it takes, and what was given up for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgespec.config.values import DrafterName, as_size
from edgespec.memory.fit import Fitted, GivenUp
from edgespec.memory.plan import FitVerdict, Plan, Room
from edgespec.platform.machine import peak_rss_bytes
from edgespec.platform.memory import MemoryWatch, own_bytes, return_freed_memory

if TYPE_CHECKING:  # numpy, which a plan alone does without
    from edgespec.control.base import Controller
    from edgespec.engines.parked import ParkedStates


class Relief:
    """What a model can give up. `drop_models` closes its draft models and returns the drafters that had one."""

    def __init__(
        self, watch: MemoryWatch, parked: ParkedStates, drop_models: Callable[[], tuple[DrafterName, ...]]
    ) -> None:
        self._watch, self._parked, self._drop_models = watch, parked, drop_models
        self._is_helpless = False  # nothing was left to release, which was said

    def relieve(self, controllers: Callable[[], Iterable[Controller]]) -> str:
        """Free what is needed and say what was given up; empty where nothing is. `controllers` in use learn of it."""
        if not self._watch.excess():
            return ""
        return_freed_memory()  # what the allocator keeps for later is in the way of nobody
        excess = self._watch.excess_now()
        if not excess:
            return ""
        over = f"memory: {as_size(excess)} {self._watch.why}"
        saved = self._parked.num_bytes
        self._parked.clear()
        if saved >= excess:
            return f"{over}: saved states of other conversations dropped"
        names = self._drop_models()
        for controller in controllers():
            controller.drop(names)
        return_freed_memory()
        if names:
            return f"{over}: draft model released ({', '.join(names)}), drafters that need none stay on"
        if self._is_helpless:
            return ""
        self._is_helpless = True
        return f"{over}, and there is nothing left to release: use a smaller --ctx-size"


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """`plan` and `verdict` of the load, what was `given_up`, and the `watch` that keeps the budget.

    `parked_bytes`: room for saved states of other conversations, beyond the plan.
    """

    plan: Plan
    verdict: FitVerdict
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
        watch = MemoryWatch(room.most_in_budget(fitted.plan), planned_bytes=planned)
        return cls(fitted.plan, fitted.verdict, fitted.given_up, watch, parked, fitted.note)

    @property
    def own_bytes(self) -> int | None:
        """The process's own memory now, without files; None if the system does not report it."""
        return own_bytes()

    @property
    def peak_rss_bytes(self) -> int:
        """The most memory that the process ever had, mapped files included."""
        return peak_rss_bytes()


def plan_object(fitted: Fitted | MemoryReport) -> dict[str, Any]:
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

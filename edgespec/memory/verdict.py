"""Whether a plan fits: its own memory is a hard limit, mapped weights a soft one, which only cost speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgespec.config.values import MemoryBudget, as_size, parse_budget
from edgespec.memory.plan import Plan
from edgespec.platform.memory import Limit, free_memory, limits, own_bytes

Fit = Literal["fits", "pages", "refused"]
BUDGET = "the budget"
_ORDER: tuple[Fit, ...] = ("fits", "pages", "refused")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`needed_bytes` against `free_bytes` under the limit `name`, the tightest one."""

    fit: Fit
    needed_bytes: int
    free_bytes: int
    name: str

    def __str__(self) -> str:
        needed, free = as_size(self.needed_bytes), as_size(self.free_bytes)
        if self.fit == "fits":
            more = "" if self.name == BUDGET else " more"  # Python and the libraries are in memory already
            return f"fits: {needed}{more} of {free}, {self.name}"
        if self.fit == "pages":
            when = " once the machine runs out of free memory" if self.name == BUDGET else ""
            return f"will page (slow){when}: {needed} with the weights in their files, {free} of {self.name}"
        return f"refused: needs {needed}, {free} is left under {self.name}"


@dataclass(frozen=True, slots=True)
class Room:
    """What this process may take. `budget_bytes`: set by the user, for all of it; `own`: what it takes already."""

    budget_bytes: int | None
    limits: tuple[Limit, ...]
    own: int = 0

    @classmethod
    def now(cls, memory: str | int | None) -> Room:
        """The room there is at present; `memory` as in LoadOptions. Raises ConfigError."""
        own = own_bytes() or 0
        budget = MemoryBudget() if memory is None else parse_budget(memory)
        is_set = budget.num_bytes is not None or budget.share < 1
        free = free_memory()
        total = None if free is None else free + own
        return cls(budget.of(total) if is_set else None, limits(), own)

    @property
    def has_resource_limits(self) -> bool:
        """Whether reserved addresses count too, such as the unused stacks of threads."""
        return any(limit.kind != "memory" for limit in self.limits)

    def most_own(self, plan: Plan) -> int | None:
        """What the process's own memory may grow to; None without a limit."""
        most = [self.own + each.free_bytes for each in self.limits if each.kind != "addresses"]
        in_budget = self.most_in_budget(plan)
        return min(most if in_budget is None else [*most, in_budget], default=None)

    def most_in_budget(self, plan: Plan) -> int | None:
        """What the process's own memory may grow to under the user's budget; None without one."""
        if self.budget_bytes is None:
            return None
        return self.own - min(self.own, plan.process.own) + self.budget_bytes

    def verdict(self, plan: Plan) -> Verdict:
        """The worst over all limits; of equals the tightest."""
        found = [self._under(limit, plan) for limit in self.limits]
        if self.budget_bytes is not None:
            found.append(_judged(plan.own_bytes, plan.working_bytes, self.budget_bytes, self.budget_bytes, BUDGET))
        unknown = Verdict("fits", plan.working_bytes, plan.working_bytes, "no known limit")
        return max(found, key=lambda v: (_ORDER.index(v.fit), v.needed_bytes - v.free_bytes), default=unknown)

    def _under(self, limit: Limit, plan: Plan) -> Verdict:
        # What Python and the libraries take already was taken from what is left.
        own = plan.own_bytes - min(self.own, plan.process.own)
        if limit.kind == "memory":
            mapped = plan.working_bytes - plan.own_bytes - plan.process.mapped
            return _judged(own, own + mapped, limit.free_bytes, limit.free_bytes - limit.swap_bytes, limit.name)
        needed = own + plan.reserved_bytes
        if limit.kind == "addresses":
            needed += plan.mapped_bytes - plan.process.mapped
        return _judged(needed, needed, limit.free_bytes, limit.free_bytes, limit.name)


def _judged(hard: int, soft: int, most: int, fast: int, name: str) -> Verdict:
    """Refused if `hard` bytes exceed `most`; pages if `soft`, which includes mapped files, exceed `fast`."""
    if hard > most:
        return Verdict("refused", hard, most, name)
    return Verdict("pages" if soft > fast else "fits", soft, fast, name)

"""What was learnt of drafters, kept apart for kinds of sampling under which a draft's acceptance differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.control.choice import Hedge
from edgespec.control.drafter_state import DrafterState
from edgespec.drafters.base import Drafter, DraftRequest


class Kinds:
    """By kind of sampling: the state of every drafter and the weights of the choice among them."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self._drafters = drafters
        self._kinds: dict[str, tuple[dict[str, DrafterState], Hedge]] = {}

    def of(self, kind: str) -> tuple[dict[str, DrafterState], Hedge]:
        """Those of one kind, with nothing known at first."""
        if kind not in self._kinds:
            states = {name: DrafterState.of(drafter) for name, drafter in self._drafters.items()}
            self._kinds[kind] = states, Hedge(self._drafters)
        return self._kinds[kind]

    def kept(self) -> dict[str, Any]:
        """For the next run, as JSON."""
        return {
            kind: {name: state.kept() for name, state in states.items()} for kind, (states, _) in self._kinds.items()
        }

    def restore(self, kept: object) -> None:
        """Go on from what `kept` gave; what does not fit is left out."""
        for kind, drafters in kept.items() if isinstance(kept, dict) else ():
            states, _ = self.of(kind)
            for name, parts in drafters.items() if isinstance(drafters, dict) else ():
                if name not in states:
                    continue
                try:
                    states[name].restore(parts)
                except (ValueError, TypeError, KeyError, IndexError):
                    states[name] = DrafterState.of(self._drafters[name])


def kind_of(request: DraftRequest) -> str:
    """By temperature, and by whether the rule compares distributions."""
    temperature = request.sampler.sampling.temperature
    heat = "greedy" if temperature == 0 else "cool" if temperature < 0.5 else "warm" if temperature <= 1.1 else "hot"
    return f"{heat} rejection" if request.needs_distributions else heat

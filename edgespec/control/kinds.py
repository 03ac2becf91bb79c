"""What is learnt of drafters, kept apart by kind of text: how it is sampled, and whether its prompt is long.

Acceptance differs between the kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from edgespec.control import constants as c
from edgespec.control.choice import DrafterState, Hedge
from edgespec.control.round import Round, UnusedDrafts
from edgespec.control.text_mean import DecisionScore
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import TokenIds

LONG = " long"  # of a kind's name


@dataclass(slots=True)
class Kind:
    """What is known of texts of one kind: of each drafter, of the weights among them, of what a decision gains."""

    states: dict[str, DrafterState]
    hedge: Hedge
    score: DecisionScore = field(default_factory=DecisionScore)

    def begin(self) -> None:
        """Another text begins."""
        self.score.begin()
        for state in self.states.values():
            state.begin()

    def rested(self, num_rounds: int) -> None:
        """`num_rounds` went by without a decision."""
        for state in self.states.values():
            state.rested(num_rounds)

    def learn_unused(self, drafts: UnusedDrafts, text_ids: TokenIds) -> None:
        """Learn from the unused `drafts` that the text [n] decides by now."""
        for unused, agreed in drafts.resolved(text_ids):
            self.states[unused.drafter].learn(unused.draft, agreed)
            if unused.kept:
                net = min(agreed, unused.kept) - unused.cost_tokens
                self.hedge.update(unused.gains, {unused.drafter: net})

    def count_probes(self, decided: Round, drafters: Mapping[str, Drafter]) -> None:
        """A round was `decided` among `drafters`, of whom the paid ones are probed now and then."""
        is_promising = decided.paid is not None and decided.paid.is_promising
        for name, state in self.states.items():
            if name in drafters and not drafters[name].is_free:
                expected = decided.gains.get(name, 0.0) > 0
                state.count_probe(asked=name == decided.chosen, expected=expected, promising=is_promising)


class Kinds:
    """What is known of each kind of text (`kind_of`)."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self._drafters = drafters
        self._kinds: dict[str, Kind] = {}

    def of(self, kind: str) -> Kind:
        """What is known of one kind, made when first asked for."""
        if kind not in self._kinds:
            other = self._kinds.get(kind.removesuffix(LONG) if kind.endswith(LONG) else kind + LONG)
            if other is not None:  # the same sampling: nearer than a prior
                self._kinds[kind] = deepcopy(other)
            else:
                states = {name: DrafterState.of(drafter) for name, drafter in self._drafters.items()}
                self._kinds[kind] = Kind(states, Hedge(self._drafters))
        return self._kinds[kind]

    def to_json(self) -> dict[str, Any]:
        """What was learnt, for the next run."""
        kinds = self._kinds.items()
        return {name: {each: state.to_json() for each, state in kind.states.items()} for name, kind in kinds}

    def restore(self, kept: object) -> None:
        """Continue from what `to_json` returned; what does not fit is ignored."""
        for kind, drafters in kept.items() if isinstance(kept, dict) else ():
            states = self.of(kind).states
            for name, parts in drafters.items() if isinstance(drafters, dict) else ():
                if name not in states:
                    continue
                try:
                    states[name].restore(parts)
                except (ValueError, TypeError, KeyError, IndexError):
                    states[name] = DrafterState.of(self._drafters[name])


def kind_of(request: DraftRequest, prompt_tokens: int) -> str:
    """The kind of text: temperature, whether the rule compares distributions or a grammar constrains, a long prompt.

    Answers about a long text are of another kind than others: fewer tokens of heads are accepted
    (docs/benchmarks/heads.md).
    """
    temperature = request.sampler.sampling.temperature
    heat = "greedy" if temperature == 0 else "cool" if temperature < 0.5 else "warm" if temperature <= 1.1 else "hot"
    kind = f"{heat} rejection" if request.needs_distributions else heat
    kind = kind if request.sampler.constraint is None else f"{kind} constrained"
    return kind + LONG if prompt_tokens >= c.LONG_PROMPT else kind

"""The choice of a drafter: what is learnt of each, and the weights among them, by kind of sampling.

Hedge over policies (Freund & Schapire 1997; fixed share of Herbster & Warmuth 1998). The policies are "never draft",
"this drafter whenever it expects a gain" and "the drafter that expects most". Drafters that copy are right in bursts,
so the last one is usually best, but it relies on expectations. The weights do not: they follow the tokens gained, net
of their cost at the running rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Self

from edgespec.control import constants as c
from edgespec.control.confidence import BetaTable, Calibrator, Logistic, NextConfidence
from edgespec.control.length import path_products
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import Draft, Verdict

BEST, NEVER = "best", "never"
LONG = " long"  # of a kind's name


@dataclass(slots=True)
class DrafterState:
    """What is known of one drafter: how its evidence is calibrated, its next confidence, when to probe it again."""

    calibrator: Calibrator
    upcoming: NextConfidence = field(default_factory=NextConfidence)
    expected_gain: float | None = None  # tokens per draft of a paid drafter, net of drafting, not of reading
    times_asked: int = 0
    acceptance_bias: float = 0.0  # accepted less expected tokens, decaying each round
    times_tried: float = 0.0  # number of drafts in `acceptance_bias`, decaying in the same way
    probe_in: int = c.FIRST_PROBE
    probe_interval: int = c.PROBE_EVERY

    @classmethod
    def of(cls, drafter: Drafter) -> Self:
        """The initial state."""
        return cls(BetaTable() if drafter.evidence_kind == "bucket" else Logistic(drafter.prior))

    def confidences(self, draft: Draft) -> Iterator[float]:
        """The confidence in each token of a draft: calibrated, or the drafter's own if it gives no evidence."""
        if not draft.evidence:
            return iter(draft.confidences.tolist())
        places = range(draft.num_tokens) if draft.is_chain else draft.depths()
        return map(self.calibrator.predictor(), places, draft.evidence)

    def learn(self, draft: Draft, accepted: int) -> None:
        """The first `accepted` tokens of a chain were accepted and the next one, if there is one, was rejected."""
        for index, evidence in enumerate((draft.evidence or ())[: accepted + 1]):
            self.calibrator.observe(index, evidence, accepted=index < accepted)

    def learn_verdict(self, draft: Draft, verdict: Verdict) -> None:
        """Update from the nodes whose parents were accepted, and from accepted less expected tokens."""
        expected = sum(path_products(draft, draft.confidences.tolist()))
        self.acceptance_bias += len(verdict.accepted_nodes) - expected
        self.times_tried += 1.0
        if draft.evidence is None or draft.is_chain:
            self.learn(draft, len(verdict.accepted_nodes))
            return
        for node, depth, accepted in outcomes(draft, verdict):
            self.calibrator.observe(depth, draft.evidence[node], accepted=accepted)

    def asked(self, gain: float) -> None:
        """A paid drafter was asked and its draft is expected to gain `gain` tokens, net of the drafting."""
        self.times_asked += 1
        before = gain if self.expected_gain is None else self.expected_gain
        self.expected_gain = before + max(c.GAIN_RATE, 1.0 / (2.0 + self.times_asked)) * (gain - before)

    @property
    def score(self) -> float:
        """Expected tokens gained by asking a paid drafter, corrected by how its drafts fared against expectation.

        Without the correction a few overconfident drafts would count in full until the drafter is asked again.
        """
        return (self.expected_gain or 0.0) + self.acceptance_bias / (self.times_tried + c.BIAS_PRIOR)

    @property
    def ucb_bonus(self) -> float:
        """Upper confidence bonus on `score`, in tokens (Auer et al. 2002): large where rarely tried or long ago."""
        return c.UCB_SCALE / math.sqrt(self.times_tried + c.BIAS_PRIOR)

    def count_probe(self, *, asked: bool, expected: bool, promising: bool) -> None:
        """A round is over: a probe is due again at once after a promising draft, else after a longer interval."""
        self.acceptance_bias *= c.BIAS_DECAY
        self.times_tried *= c.BIAS_DECAY
        if not asked:
            self.probe_in -= 1
        elif promising:
            self.probe_in, self.probe_interval = 0, c.PROBE_EVERY
        else:
            self.probe_in = self.probe_interval
            if not expected:
                self.probe_interval = min(2 * self.probe_interval, c.PROBE_AT_MOST)

    def to_json(self) -> list[Any]:
        """What was learnt, for the next run."""
        return [self.calibrator.to_json(), self.upcoming.to_json()]

    def restore(self, kept: Any) -> None:
        """Continue from what `to_json` returned; raises ValueError, TypeError, KeyError or IndexError otherwise."""
        self.calibrator.restore(kept[0])
        self.upcoming.restore(kept[1])


def outcomes(draft: Draft, verdict: Verdict) -> list[tuple[int, int, bool]]:
    """(node, its depth, whether it was accepted) of every node whose parent was accepted."""
    accepted = set(verdict.accepted_nodes)
    found = []
    for depth, parent in enumerate((-1, *verdict.accepted_nodes)):
        found += [(child, depth, child in accepted) for child in draft.children_of(parent)]
    return found


@dataclass(slots=True)
class DecisionScore:
    """Tokens gained per decision, net of what it cost, whether anything was drafted or not.

    Lookups are right in bursts and rarely in between, so nothing short of the mean tells whether looking pays.
    """

    tokens: float = 0.0
    _seen: int = 0

    @property
    def pays(self) -> bool:
        return self.tokens > c.LEAST_SCORE

    def observe(self, net_tokens: float) -> None:
        self._seen += 1
        self.tokens += max(c.SCORE_RATE, 1.0 / (self._seen + c.SCORE_FIRST)) * (net_tokens - self.tokens)


class Hedge:
    """Weights of the policies over `drafters`."""

    def __init__(self, drafters: Iterable[str]) -> None:
        self._weights = dict.fromkeys((BEST, NEVER, *drafters), 1.0)
        self._weights[BEST] = 2.0

    @property
    def weights(self) -> dict[str, float]:
        """The weights, summing to 1."""
        total = sum(self._weights.values())
        return {name: weight / total for name, weight in self._weights.items()}

    def pick(self, gains: Mapping[str, float]) -> str | None:
        """The drafter that the heaviest policy takes, given what each expects to gain in tokens; None: do not draft."""
        leader = max(self._weights, key=self._weights.__getitem__)
        return choice_of(leader, gains)

    def second(self, gains: Mapping[str, float]) -> str | None:
        """The best of the others by their `gains`, for a draft that turned out to be expected to gain less."""
        leader = max(self._weights, key=self._weights.__getitem__)
        return None if leader == NEVER else choice_of(BEST, gains)

    def update(self, gains: Mapping[str, float], net_tokens: Mapping[str, float]) -> None:
        """After a round: the `gains` that were expected, and the `net_tokens` gained by drafters where known."""
        for policy in self._weights:
            drafter = choice_of(policy, gains)
            if drafter is not None and drafter in net_tokens:
                net = max(-c.HEDGE_MOST_GAIN, min(c.HEDGE_MOST_GAIN, net_tokens[drafter]))
                self._weights[policy] *= math.exp(c.HEDGE_RATE * net)

    def share(self) -> None:
        """Once a round: spread a little of all weight evenly, so that every policy can recover."""
        total = sum(self._weights.values())
        spread = c.HEDGE_SHARE / len(self._weights)
        self._weights = {name: (1 - c.HEDGE_SHARE) * weight / total + spread for name, weight in self._weights.items()}


def choice_of(policy: str, gains: Mapping[str, float]) -> str | None:
    """The drafter of a policy when the drafters expect `gains` over plain decoding; None: do not draft."""
    if policy == NEVER or not gains:
        return None
    drafter = max(gains, key=gains.__getitem__) if policy == BEST else policy
    return drafter if gains.get(drafter, 0.0) > 0 else None


def add_ucb_bonus(gains: dict[str, float], bonuses: Mapping[str, float]) -> None:
    """Swap the largest gain with that of the drafter whose gain plus bonus is largest, among those that expect a gain.

    `bonuses`: tokens by which a paid drafter may be better than it expects. Nothing is learnt of a drafter that is not
    asked, so that a few early failures would leave it out for long. The swap explores without changing the largest
    gain, so the bonus never makes a round draft that would not.
    """
    able = [name for name in bonuses if gains[name] > 0]
    if len(able) > 1:
        best = max(able, key=gains.__getitem__)
        explored = max(able, key=lambda name: gains[name] + bonuses[name])
        gains[best], gains[explored] = gains[explored], gains[best]


class Kinds:
    """The drafters' states and the weights of the choice, kept apart by kind of text (`kind_of`).

    Acceptance differs between the kinds.
    """

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self._drafters = drafters
        self._kinds: dict[str, tuple[dict[str, DrafterState], Hedge, DecisionScore]] = {}

    def of(self, kind: str) -> tuple[dict[str, DrafterState], Hedge, DecisionScore]:
        """(drafter states, weights, score of a decision) of one kind, made when first asked for."""
        if kind not in self._kinds:
            other = self._kinds.get(kind.removesuffix(LONG) if kind.endswith(LONG) else kind + LONG)
            if other is not None:  # the same sampling: nearer than a prior
                self._kinds[kind] = deepcopy(other)
            else:
                states = {name: DrafterState.of(drafter) for name, drafter in self._drafters.items()}
                self._kinds[kind] = states, Hedge(self._drafters), DecisionScore()
        return self._kinds[kind]

    def to_json(self) -> dict[str, Any]:
        """What was learnt, for the next run."""
        kinds = self._kinds.items()
        return {kind: {name: state.to_json() for name, state in states.items()} for kind, (states, *_) in kinds}

    def restore(self, kept: object) -> None:
        """Continue from what `to_json` returned; what does not fit is ignored."""
        for kind, drafters in kept.items() if isinstance(kept, dict) else ():
            states, *_ = self.of(kind)
            for name, parts in drafters.items() if isinstance(drafters, dict) else ():
                if name not in states:
                    continue
                try:
                    states[name].restore(parts)
                except (ValueError, TypeError, KeyError, IndexError):
                    states[name] = DrafterState.of(self._drafters[name])


def kind_of(request: DraftRequest, prompt_tokens: int) -> str:
    """The kind of text: temperature, whether the rule compares distributions or a grammar constrains, a long prompt.

    Answers about a long text are of another kind than others: fewer tokens of heads are accepted (docs/training.md).
    """
    temperature = request.sampler.sampling.temperature
    heat = "greedy" if temperature == 0 else "cool" if temperature < 0.5 else "warm" if temperature <= 1.1 else "hot"
    kind = f"{heat} rejection" if request.needs_distributions else heat
    kind = kind if request.sampler.constraint is None else f"{kind} constrained"
    return kind + LONG if prompt_tokens >= c.LONG_PROMPT else kind

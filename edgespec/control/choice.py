"""The choice of a drafter: what is learnt of each, and the weights among them.

Hedge over policies (Freund & Schapire 1997; fixed share of Herbster & Warmuth 1998). The policies are "never draft",
"this drafter whenever it expects a gain" and "the drafter that expects most". Drafters that copy are right in bursts,
so the last one is usually best, but it relies on expectations. The weights do not: they follow the tokens gained, net
of their cost at the running rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from edgespec.control import constants as c
from edgespec.control.confidence import BetaTable, Calibrator, Logistic, NextConfidence
from edgespec.control.length import path_products
from edgespec.control.text_mean import TextMean
from edgespec.drafters.base import Drafter
from edgespec.types import Draft, Verdict

BEST, NEVER = "best", "never"


@dataclass(slots=True)
class DrafterState:
    """What is known of one drafter: how its evidence is calibrated, its next confidence, when to probe it again.

    `gain`: tokens per draft of a paid drafter, net of drafting, not of reading.
    """

    calibrator: Calibrator
    upcoming: NextConfidence = field(default_factory=NextConfidence)
    gain: TextMean = field(default_factory=lambda: TextMean(c.GAIN_RATE, c.GAIN_FIRST))
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

    def begin(self) -> None:
        """Another text begins: one that usually gains is tried soon, however it fared in the last text."""
        self.gain.begin()
        if self.gain.value > 0:
            self.probe_in = min(self.probe_in, c.FIRST_PROBE)

    def asked(self, gain: float | None) -> None:
        """A paid drafter was asked and its draft is expected to gain `gain` tokens, net of the drafting.

        None: nobody knows yet what verifying drafts costs.
        """
        self.times_asked += 1
        if gain is not None:
            self.gain.observe(gain)

    @property
    def score(self) -> float:
        """Expected tokens gained by asking a paid drafter, corrected by how its drafts fared against expectation.

        Without the correction a few overconfident drafts would count in full until the drafter is asked again.
        """
        return self.gain.value + self.acceptance_bias / (self.times_tried + c.BIAS_PRIOR)

    @property
    def ucb_bonus(self) -> float:
        """Upper confidence bonus on `score`, in tokens (Auer et al. 2002): large where rarely tried or long ago."""
        return c.UCB_SCALE / math.sqrt(self.times_tried + c.BIAS_PRIOR)

    def rested(self, num_rounds: int) -> None:
        """`num_rounds` went by without a decision."""
        self.probe_in -= num_rounds

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

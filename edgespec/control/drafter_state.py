"""What the automatic controller learns of one drafter in one kind of sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from edgespec.control.branches import outcomes, path_products
from edgespec.control.confidence import BetaTable, Calibrator, Logistic, NextConfidence
from edgespec.drafters.base import Drafter
from edgespec.types import Draft, Verdict

_PROBE_EVERY, _PROBE_AT_MOST = 8, 32  # rounds between two probes of a paid drafter, doubling
_GAIN_RATE = 0.05  # per draft, of the expected gain of asking for one
_BIAS_DECAY, _BIAS_PRIOR = 0.98, 4.0  # per round; outcomes of drafts that chance may explain
_UCB_SCALE = 2.5  # tokens: standard deviation of accepted less expected tokens of a draft


@dataclass(slots=True)
class DrafterState:
    """Calibration of its evidence, the forecast for its next token, and when to probe it again."""

    calibrator: Calibrator
    upcoming: NextConfidence = field(default_factory=NextConfidence)
    expected_gain: float | None = None  # tokens per draft of a paid drafter, net of drafting, not of reading
    times_asked: int = 0
    acceptance_bias: float = 0.0  # accepted less expected tokens, decaying with every round
    times_tried: float = 0.0  # drafts behind `acceptance_bias`, decaying likewise
    probe_in: int = _PROBE_EVERY
    probe_interval: int = _PROBE_EVERY

    @classmethod
    def of(cls, drafter: Drafter) -> Self:
        """Of a drafter of which nothing is known yet."""
        return cls(BetaTable() if drafter.evidence_kind == "bucket" else Logistic(drafter.prior))

    def confidences(self, draft: Draft) -> Iterator[float]:
        """Of its tokens in turn: calibrated, or the drafter's own where it gives no evidence."""
        if not draft.evidence:
            return iter(draft.confidences.tolist())
        places = range(draft.num_tokens) if draft.is_chain else draft.depths()
        return map(self.calibrator.judge(), places, draft.evidence)

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
        self.expected_gain = before + max(_GAIN_RATE, 1.0 / (2.0 + self.times_asked)) * (gain - before)

    @property
    def score(self) -> float:
        """Expected tokens gained by asking a paid drafter, corrected by how its drafts fared against expectation.

        Without the correction a few overconfident drafts would be believed until the drafter is asked again.
        """
        return (self.expected_gain or 0.0) + self.acceptance_bias / (self.times_tried + _BIAS_PRIOR)

    @property
    def ucb_bonus(self) -> float:
        """Upper confidence bonus on `score`, in tokens (Auer et al. 2002): large where rarely tried or long ago."""
        return _UCB_SCALE / math.sqrt(self.times_tried + _BIAS_PRIOR)

    def count_probe(self, *, asked: bool, expected: bool, promising: bool) -> None:
        """One round is over; if left alone it is tried again: at once if it promised something, else more seldom."""
        self.acceptance_bias *= _BIAS_DECAY
        self.times_tried *= _BIAS_DECAY
        if not asked:
            self.probe_in -= 1
        elif promising:
            self.probe_in, self.probe_interval = 0, _PROBE_EVERY
        else:
            self.probe_in = self.probe_interval
            if not expected:
                self.probe_interval = min(2 * self.probe_interval, _PROBE_AT_MOST)

    def kept(self) -> list[Any]:
        """What the next run may begin with, as JSON."""
        return [self.calibrator.state(), self.upcoming.state()]

    def restore(self, kept: Any) -> None:
        """Go on from what `kept` gave; raises ValueError, TypeError, KeyError or IndexError for anything else."""
        self.calibrator.restore(kept[0])
        self.upcoming.restore(kept[1])

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
_PROMISE_RATE = 0.05  # per draft, of what asking for one promises
_LUCK_MEMORY, _LUCK_DOUBT = 0.98, 4.0  # per round, of drafts' outcomes; how many of them chance may explain
_HOPE = 2.5  # tokens: the standard deviation of what stands of a draft beyond its promise


@dataclass(slots=True)
class DrafterState:
    """How far its evidence is to be trusted, what to expect of its next token, and when to try it again."""

    calibrator: Calibrator
    upcoming: NextConfidence = field(default_factory=NextConfidence)
    promise: float | None = None  # tokens to gain from asking a paid drafter, drafting paid, reading not
    times_asked: int = 0
    luck: float = 0.0  # tokens that stood beyond those that were promised, fading with every round
    times_tried: float = 0.0  # drafts that these are of, likewise
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
        """Of a chain, the first `accepted` tokens stood and the next one, if there is one, did not."""
        for index, evidence in enumerate((draft.evidence or ())[: accepted + 1]):
            self.calibrator.observe(index, evidence, accepted=index < accepted)

    def learn_verdict(self, draft: Draft, verdict: Verdict) -> None:
        """Of any draft, what became of the nodes whose parents stood, and of what its confidences promised."""
        promised = sum(path_products(draft, draft.confidences.tolist()))
        self.luck += len(verdict.accepted_nodes) - promised
        self.times_tried += 1.0
        if draft.evidence is None or draft.is_chain:
            self.learn(draft, len(verdict.accepted_nodes))
            return
        for node, depth, stood in outcomes(draft, verdict):
            self.calibrator.observe(depth, draft.evidence[node], accepted=stood)

    def asked(self, gain: float) -> None:
        """A paid drafter was asked, and what it drafted promises `gain` tokens, net of the drafting."""
        self.times_asked += 1
        before = gain if self.promise is None else self.promise
        self.promise = before + max(_PROMISE_RATE, 1.0 / (2.0 + self.times_asked)) * (gain - before)

    @property
    def worth(self) -> float:
        """Tokens to gain from asking a paid drafter: the promise, less what promises turned out to be too much.

        A few drafts that promised a lot would otherwise be believed until the drafter is asked again.
        """
        return (self.promise or 0.0) + self.luck / (self.times_tried + _LUCK_DOUBT)

    @property
    def hope(self) -> float:
        """Tokens by which it may be better than that, more where it was tried seldom or long ago (Auer et al. 2002)."""
        return _HOPE / math.sqrt(self.times_tried + _LUCK_DOUBT)

    def count_probe(self, *, asked: bool, expected: bool, promising: bool) -> None:
        """One round is over; if left alone it is tried again: at once if it promised something, else more seldom."""
        self.luck *= _LUCK_MEMORY
        self.times_tried *= _LUCK_MEMORY
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

"""A chain drawn token by token from rows of logits, as every drafter with a model does."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from edgespec.drafters.base import DraftRequest
from edgespec.sampling import NoTokenLeft
from edgespec.sampling.noise import Stream
from edgespec.types import Distribution, Draft, Evidence, Logits, TokenIds

# Log odds of acceptance by a token's evidence: half as steep as what fits the demo's draft and medium models on
# held-out dialogues, functions and problems (fitted biases .6, slopes .8, .3 and 2.3), since other pairs agree less.
CHAIN_PRIOR = 0.2, 0.8, 0.4, 1.8
_FOLD, _SHORT_ROW = 64, 8192  # logits of which the largest counts, in rows that are longer


@dataclass(slots=True)
class DrawnChain:
    """The tokens so far; `most` are wanted, and none behind one of `end_ids`.

    They are sampled with the request's settings and, unless the rule compares distributions, the target's noise.
    """

    request: DraftRequest
    most: int
    end_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    is_open: bool = True

    @property
    def text(self) -> TokenIds:
        """The request's tokens and those of the chain."""
        return np.concatenate((self.request.token_ids, np.array(self.token_ids, np.int32)))

    def add(self, logits: Logits, confidence: float | None = None) -> bool:
        """Draw the next token from a row [vocabulary]; whether it has one, and room for one more.

        It has none where the drafter knows no token that may come next: heads of a reduced vocabulary under a grammar.

        `confidence`: the drafter's own that the target accepts the row's likeliest token, as further evidence.
        `is_open` is whether one more is also expected to pay for a pass; a row that exists already costs nothing.
        """
        request, sampler, count = self.request, self.request.sampler, len(self.token_ids)
        history = self.text if sampler.uses_history else request.token_ids
        try:
            distribution = sampler.distribution(logits, history)
        except NoTokenLeft:
            self.is_open = False
            return False
        stream = Stream.DRAFT if request.needs_distributions else Stream.TARGET
        # Its own noise must not be used again in a later round, since what was accepted of this one depends on it.
        index = request.num_drafted + count if request.needs_distributions else 0
        token_id, lead = sampler.race(distribution, request.token_ids.size + count, stream, index)
        self.token_ids.append(token_id)
        self.distributions.append(distribution)
        evidence = evidence_of(logits, distribution.prob_of(token_id), lead)
        self.evidence.append(evidence if confidence is None else (*evidence, score_of(confidence)))
        has_room = count + 1 < self.most and token_id not in self.end_ids
        asked = request.should_continue
        self.is_open = has_room and (asked is None or asked(count + 1, self.evidence[-1]))
        return has_room

    def as_draft(self) -> Draft:
        given = self.distributions if self.request.needs_distributions else None
        return Draft.chain(self.token_ids, distributions=given, evidence=self.evidence)


def evidence_of(logits: Logits, prob: float, lead: float) -> Evidence:
    """Three scores of a drafted token: log odds of the likeliest one, the token's log probability, and its lead.

    `logits` [vocabulary]; the odds are of the plain softmax, since a greedy distribution gives everything 1. `lead`: of
    the race that drew the token (Sampler.race), which the target runs with its own probabilities; where no other token
    ran, the margin of the logits is used. A full softmax would take too long: only the largest of every few logits
    count, and the weight of the others is learnt with the slopes.
    """
    fold = _FOLD if logits.size > _SHORT_ROW else 1
    largest = logits[: logits.size // fold * fold].reshape(fold, -1).max(axis=0)
    place = largest.argmax()
    best, largest[place] = float(largest[place]), -math.inf
    others = float(np.exp(largest - best).sum())
    odds = -math.log(max(others, 1e-6))
    ahead = best - float(largest.max()) if math.isinf(lead) else lead
    return max(-3.0, min(odds, 6.0)) / 2.0, max(math.log(max(prob, 1e-9)), -4.0), min(ahead, 8.0) / 4.0


def score_of(confidence: float) -> float:
    """A probability as evidence: its log odds, halved as those of `evidence_of`."""
    prob = min(max(confidence, 1e-3), 1.0 - 1e-3)
    return math.log(prob / (1.0 - prob)) / 2.0

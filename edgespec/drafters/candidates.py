"""The candidates below a node of a draft model's tree: tokens in the order in which they are tried, with probabilities.

Under a rule that samples the target's own tokens the children are the first of the race that the target will run with
the same noise (Kool et al. 2019, arXiv 1903.06059: Gumbel top-k); under a rule that compares distributions they are
drawn without replacement with noise of the draft's own, and carry the distributions they were drawn from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.chain import evidence_of
from edgespec.sampling import Sampler
from edgespec.sampling.noise import Stream
from edgespec.types import Distribution, Evidence, Logits, TokenIds

# Fitted to the demo pair, in dialogues; the controller calibrates probabilities while it runs.
DISAGREEMENT, _AGREED = 0.6, 0.98  # typical difference of the target's logits; largest probability of acceptance
_FIRST, _LATER = 0.5, 0.3  # probability of acceptance of a drawn token of probability 0 as first child; as a later one
_KNOWN = 24  # likeliest tokens that are ranked when the sampler itself would look at one only
_NODES_PER_DEPTH = 1 << 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A child: `probability` of acceptance given its parent, `evidence` of that, `distribution` it was drawn from."""

    token_id: int
    probability: float
    evidence: Evidence = ()
    distribution: Distribution | None = None


class Candidates(ABC):
    """The children of one node, in the order in which they are tried; there are `count` at most."""

    count: int

    @abstractmethod
    def reach(self, attempt: int) -> float:
        """The probability that child `attempt` is accepted if the node is, before the child is known."""

    @abstractmethod
    def take(self, attempt: int) -> Candidate:
        """Child `attempt`; they are taken in order."""


class Raced(Candidates):
    """Children for rules that pick the target's token by a race with known noise, or greedily."""

    def __init__(
        self,
        token_ids: TokenIds,
        scores: NDArray[np.float64],
        chained: Evidence | None = None,
        disagreement: float = DISAGREEMENT,
    ) -> None:
        """`scores` [n], descending: perturbed logits; their differences are what the target's must overcome.

        `chained`: evidence of a first child where chains are drafted too; `disagreement`: how far the target's logits
        mostly differ from these.
        """
        self._token_ids, self.count, self._chained = token_ids, token_ids.size, chained
        weights = np.exp((scores - scores[0]) / disagreement)
        self._probs = _AGREED * weights / weights.sum()

    def reach(self, attempt: int) -> float:
        return float(self._probs[attempt])

    def take(self, attempt: int) -> Candidate:
        probability = self.reach(attempt)
        evidence = _half_odds(probability), -min(attempt, 2.0)
        return Candidate(int(self._token_ids[attempt]), probability, _beside(self._chained, evidence, attempt))


class Drawn(Candidates):
    """Children drawn without replacement, for rules that compare what a token was drawn from with the target.

    A child's probability before it is drawn may depend on the distribution and on the children before it.
    """

    def __init__(self, drawn: Distribution, chained: Evidence | None = None) -> None:
        """`drawn` [n]: the tokens in the order in which they come, with their probabilities."""
        self._drawn, self.count, self._chained = drawn, drawn.token_ids.size, chained
        self._refused = 1.0  # the probability that the target refuses all that were taken

    def reach(self, attempt: int) -> float:
        probs = self._drawn.probs
        return self._refused * (_LATER if attempt else _FIRST + (1.0 - _FIRST) * float(probs @ probs))

    def take(self, attempt: int) -> Candidate:
        token_ids, probs = self._drawn.token_ids[attempt:], self._drawn.probs[attempt:]
        left = Distribution(token_ids, probs / probs.sum())
        prob = float(left.probs[0])
        accepted = _LATER if attempt else _FIRST + (1.0 - _FIRST) * prob
        probability = min(self._refused * accepted, _AGREED)
        self._refused *= 1.0 - accepted
        evidence = _half_odds(probability), max(math.log(prob), -4.0), -min(attempt, 2.0)
        return Candidate(int(token_ids[0]), probability, _beside(self._chained, evidence, attempt), left)


def _half_odds(probability: float) -> float:
    return max(math.log(probability / (1.0 - probability)), -6.0) / 2.0


def _beside(chained: Evidence | None, own: Evidence, attempt: int) -> Evidence:
    """The evidence of a child where chains are drafted too: `chained` of a first one, other columns of a later one."""
    if chained is None:
        return own
    return (0.0,) * len(chained) + (1.0, *own) if attempt else chained


MakeCandidates = Callable[[Logits, int, int, TokenIds], Candidates]


def candidates_for(
    request: DraftRequest, sampler: Sampler, *, like_chains: bool = False, disagreement: float = DISAGREEMENT
) -> MakeCandidates:
    """What makes the children of a node out of the draft's row of logits [vocabulary].

    They are drawn with the settings of `sampler`, the draft's. The other arguments of the returned function are the
    children's depth, the node's number, and the tokens [m] of its path. `like_chains`: the evidence of first children
    is that of a chain's tokens, for drafters that draft both; `disagreement`: as Raced's.
    """
    text_ids = request.token_ids

    def make(logits: Logits, depth: int, node: int, path_ids: TokenIds) -> Candidates:
        uses_history = sampler.uses_history and path_ids.size > 0
        history = np.concatenate((text_ids, path_ids)) if uses_history else text_ids
        temperature, position = sampler.sampling.temperature, text_ids.size + depth
        if temperature == 0:
            known = sampler.likeliest(logits, history, _KNOWN)
            possible = known.probs > 0  # a draft with another vocabulary lacks some
            chained = evidence_of(logits, 1.0, math.inf) if like_chains else None
            return Raced(known.token_ids[possible], np.log(known.probs[possible]), chained, disagreement)
        distribution = sampler.distribution(logits, history)
        stream, index = Stream.TARGET, 0
        if request.needs_distributions:
            # Draws of one position that were looked at before must not come again, neither in this tree nor in a
            # later round, nor those of a chain: what was drafted and accepted so far depends on them.
            stream, index = Stream.DRAFT, (request.num_drafted + depth + 1) * _NODES_PER_DEPTH + node + 1
        ranked, times = sampler.ranked(distribution, position, stream, index)
        lead = math.log(times[1] / times[0]) if times.size > 1 else math.inf
        chained = evidence_of(logits, float(ranked.probs[0]), lead) if like_chains else None
        if request.needs_distributions:
            return Drawn(ranked, chained)
        return Raced(ranked.token_ids, -temperature * np.log(times), chained, disagreement)

    return make

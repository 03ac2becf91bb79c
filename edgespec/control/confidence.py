"""Calibration: from a drafter's evidence to the probability that the target accepts a token, learnt from outcomes.

A drafter's own probabilities are unreliable: greedy ones are always 1, and a domain that the draft knows badly shows
only in outcomes. Old outcomes fade, since texts change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

from edgespec.control import constants as c
from edgespec.types import Evidence

_SLOPE = 0.5  # prior for evidence whose slope is not known
Predictor = Callable[[Evidence], float]
_LOWEST, _HIGHEST = (math.log(limit / (1.0 - limit)) for limit in (c.LEAST_PROBABILITY, c.MOST_PROBABILITY))


class Logistic:
    """Logistic regression for one drafter in one kind of text, by online Newton steps of diagonal curvature.

    The score is a bias, the recent error, since drafts are good or bad over stretches of text, and the evidence, each
    times its weight.
    """

    def __init__(self, prior: Sequence[float] = (-0.2,)) -> None:
        """`prior`: the bias, then the weights of the evidence; _SLOPE for those not given."""
        self._prior = (prior[0], _SLOPE, *prior[1:])
        self._weights: list[float] = []
        self._precisions: list[float] = []
        self._recent_error = 0.0

    def predictor(self) -> Predictor:
        """The probability that a token of a draft is accepted, given that all before it were, by its evidence.

        As of now: it ignores what is observed later, and is fast for many tokens.
        """
        self._grow(2)
        common, slopes = self._weights[0] + self._weights[1] * self._recent_error, self._weights[2:]

        def predicted(evidence: Evidence) -> float:
            if len(evidence) > len(slopes):
                self._grow(2 + len(evidence))
                slopes[:] = self._weights[2:]
            return _chance(sum(map(mul, slopes, evidence), common))

        return predicted

    def observe(self, evidence: Evidence, *, accepted: bool) -> None:
        """Learn the outcome of a token whose predecessors were all accepted."""
        inputs = (1.0, self._recent_error, *evidence)
        self._grow(len(inputs))
        probability = _chance(sum(map(mul, self._weights, inputs)))
        error, curvature = accepted - probability, max(probability * (1.0 - probability), 0.02)
        for number, value in enumerate(inputs):
            least = self._least_precision(number)
            known = max(self._precisions[number] * c.LOGISTIC_MEMORY, least) + curvature * value * value
            self._precisions[number] = known
            self._weights[number] += error * value / known
        # its standard deviation is about 0.1
        self._recent_error += (1.0 - c.ERROR_MEMORY) * (4.0 * error - self._recent_error)

    def to_json(self) -> Any:
        """What was learnt, for the next run."""
        return [self._weights, self._precisions]

    def restore(self, state: Any) -> None:
        """Continue from what `to_json` returned; raises ValueError or TypeError when it is something else."""
        weights, precisions = ([float(value) for value in part] for part in state)
        if len(weights) != len(precisions) or not all(map(math.isfinite, (*weights, *precisions))):
            raise ValueError("a logistic's state has other sizes, or values that are not finite")
        if min(precisions, default=1.0) <= 0:
            raise ValueError("a logistic's state has precisions that are not positive")
        self._weights, self._precisions = weights, precisions

    @staticmethod
    def _least_precision(number: int) -> float:
        return c.PRECISION if number else 1.0

    def _grow(self, size: int) -> None:
        for number in range(len(self._weights), size):
            self._weights.append(self._prior[number] if number < len(self._prior) else _SLOPE)
            self._precisions.append(self._least_precision(number))


def _chance(score: float) -> float:
    """The probability of these log odds, within LEAST_PROBABILITY and MOST_PROBABILITY."""
    if score >= _HIGHEST:
        return c.MOST_PROBABILITY
    return c.LEAST_PROBABILITY if score <= _LOWEST else 1.0 / (1.0 + math.exp(-score))

"""Calibration: from a drafter's evidence to the probability that the target accepts a token, learnt from outcomes.

A drafter's own probabilities are unreliable: greedy ones are always 1, and a domain that the draft knows badly shows
only in outcomes. Old outcomes fade, since texts change.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

from edgespec.control import constants as c
from edgespec.types import Evidence

_BUCKET_OF = (0, 1, 2, 3, 3, 4, 4, 4)  # position of a token in its draft -> bucket; later ones share the last
NUM_BUCKETS = 6
_LAST = len(_BUCKET_OF)  # the first position of the last bucket
Predictor = Callable[[int, Evidence], float]
_LOWEST, _HIGHEST = (math.log(limit / (1.0 - limit)) for limit in (c.LEAST_PROBABILITY, c.MOST_PROBABILITY))


def bucket_of(index: int) -> int:
    """The bucket of a draft's token `index`, from 0."""
    return _BUCKET_OF[index] if index < _LAST else NUM_BUCKETS - 1


class Calibrator(ABC):
    """Estimates for one drafter in one kind of sampling."""

    @abstractmethod
    def probability(self, index: int, evidence: Evidence) -> float:
        """The probability that token `index` (from 0) of a draft is accepted, given that all before it were."""

    @abstractmethod
    def predictor(self) -> Predictor:
        """`probability` as of now, fast for many tokens; it ignores what is observed later."""

    @abstractmethod
    def observe(self, index: int, evidence: Evidence, *, accepted: bool) -> None:
        """Learn the outcome of a token whose predecessors were all accepted."""

    @abstractmethod
    def to_json(self) -> Any:
        """What was learnt, for the next run."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Continue from what `to_json` returned; raises ValueError, TypeError or KeyError when it is something else."""


class BetaTable(Calibrator):
    """A Beta posterior per (class of proposal, position bucket), for drafters that copy.

    The outcomes of a class as a whole are the prior of each position, with the weight of BETA_PRIOR_WEIGHT outcomes.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[float, int], list[float]] = {}  # [accepted, tried], old outcomes fading
        self._predictor: Predictor | None = None

    def probability(self, index: int, evidence: Evidence) -> float:
        whole = self._counts.get((evidence[0], -1), (1.0, 2.0))
        pooled = (whole[0] + 1.0) / (whole[1] + 2.0)
        accepted, tried = self._counts.get((evidence[0], bucket_of(index)), (0.0, 0.0))
        return (accepted + c.BETA_PRIOR_WEIGHT * pooled) / (tried + c.BETA_PRIOR_WEIGHT)

    def predictor(self) -> Predictor:
        if self._predictor is None:
            known: dict[tuple[float, int], float] = {}  # a draft's tokens are of few classes and buckets

            def predicted(index: int, evidence: Evidence) -> float:
                place = evidence[0], bucket_of(index)
                if place not in known:
                    known[place] = self.probability(index, evidence)
                return known[place]

            self._predictor = predicted
        return self._predictor

    def observe(self, index: int, evidence: Evidence, *, accepted: bool) -> None:
        self._predictor = None
        for place in (-1, bucket_of(index)):
            counts = self._counts.setdefault((evidence[0], place), [0.0, 0.0])
            counts[0] = counts[0] * c.BETA_MEMORY + accepted
            counts[1] = counts[1] * c.BETA_MEMORY + 1.0

    def to_json(self) -> Any:
        return [[*key, *counts] for key, counts in self._counts.items()]

    def restore(self, state: Any) -> None:
        counts = {(float(row[0]), int(row[1])): [float(row[2]), float(row[3])] for row in state}
        if not all(0 <= accepted <= tried < math.inf for accepted, tried in counts.values()) or not all(
            -1 <= bucket < NUM_BUCKETS for _, bucket in counts
        ):
            raise ValueError("a table of outcomes has impossible counts")
        self._counts, self._predictor = counts, None


class Logistic(Calibrator):
    """Logistic regression by online Newton steps of diagonal curvature.

    Score: a bias, an offset per position, the evidence, and the recent error, since drafts are good or bad over
    stretches of text.
    """

    def __init__(self, prior: Sequence[float] = (-0.2,)) -> None:
        """`prior`: the bias, then the slopes of the evidence; LOGISTIC_SLOPE for those not given."""
        self._bias, self._precision = prior[0], c.LOGISTIC_PRECISION
        self._prior = (c.LOGISTIC_SLOPE, *prior[1:])
        self._places = [0.0] * NUM_BUCKETS
        self._place_precision = [c.PLACE_PRECISION] * NUM_BUCKETS
        self._slopes: list[float] = []  # of the recent error, then of the evidence
        self._slope_precision: list[float] = []
        self._recent_error = 0.0
        self._predictor: Predictor | None = None

    def probability(self, index: int, evidence: Evidence) -> float:
        self._grow(1 + len(evidence))
        score = self._bias + self._places[bucket_of(index)]
        return _chance(sum(map(mul, self._slopes, (self._recent_error, *evidence)), score))

    def predictor(self) -> Predictor:
        if self._predictor is None:
            self._grow(1)
            common, places = self._bias + self._slopes[0] * self._recent_error, tuple(self._places)
            slopes = self._slopes[1:]

            def predicted(index: int, evidence: Evidence) -> float:
                if len(evidence) > len(slopes):
                    self._grow(1 + len(evidence))
                    slopes[:] = self._slopes[1:]
                place = _BUCKET_OF[index] if index < _LAST else NUM_BUCKETS - 1
                return _chance(sum(map(mul, slopes, evidence), common + places[place]))

            self._predictor = predicted
        return self._predictor

    def observe(self, index: int, evidence: Evidence, *, accepted: bool) -> None:
        probability = self.probability(index, evidence)
        self._predictor = None
        error, curvature = accepted - probability, max(probability * (1.0 - probability), 0.02)
        self._precision = max(self._precision * c.LOGISTIC_MEMORY, c.LOGISTIC_PRECISION) + curvature
        self._bias += error / self._precision
        place = bucket_of(index)
        known = max(self._place_precision[place] * c.LOGISTIC_MEMORY, c.PLACE_PRECISION) + curvature
        self._place_precision[place] = known
        self._places[place] += error / known
        precisions, slopes = self._slope_precision, self._slopes
        for number, value in enumerate((self._recent_error, *evidence)):
            known = max(precisions[number] * c.LOGISTIC_MEMORY, c.LOGISTIC_PRECISION) + curvature * value * value
            precisions[number] = known
            slopes[number] += error * value / known
        self._recent_error += (1.0 - c.ERROR_MEMORY) * (c.ERROR_SCALE * error - self._recent_error)

    def to_json(self) -> Any:
        return [
            [self._bias, self._precision],
            self._places,
            self._place_precision,
            self._slopes,
            self._slope_precision,
        ]

    def restore(self, state: Any) -> None:
        common, places, place_precision, slopes, slope_precision = ([float(value) for value in part] for part in state)
        if not (len(places) == len(place_precision) == NUM_BUCKETS and len(slopes) == len(slope_precision)):
            raise ValueError("a logistic's state has other sizes")
        if not all(math.isfinite(value) for part in state for value in part):
            raise ValueError("a logistic's state has values that are not finite")
        if min(*common[1:], *place_precision, *slope_precision, 1.0) <= 0:
            raise ValueError("a logistic's state has precisions that are not positive")
        self._bias, self._precision = common
        self._places, self._place_precision = places, place_precision
        self._slopes, self._slope_precision, self._predictor = slopes, slope_precision, None

    def _grow(self, size: int) -> None:
        while len(self._slopes) < size:
            number = len(self._slopes)
            self._slopes.append(self._prior[number] if number < len(self._prior) else c.LOGISTIC_SLOPE)
            self._slope_precision.append(c.SLOPE_PRECISION)


def _chance(score: float) -> float:
    """The probability of these log odds, within LEAST_PROBABILITY and MOST_PROBABILITY."""
    if score >= _HIGHEST:
        return c.MOST_PROBABILITY
    return c.LEAST_PROBABILITY if score <= _LOWEST else 1.0 / (1.0 + math.exp(-score))


class NextConfidence:
    """The expected confidence of a draft's next token before it is drafted, by the confidence of the one before it.

    All positions share the estimates: later ones would otherwise never be learnt of drafts that always end early.
    """

    def __init__(self) -> None:
        self._means = list(c.NEXT_FIRST)
        self._counts = [c.NEXT_FIRST_COUNT] * len(c.NEXT_FIRST)

    def expected(self, before: float | None) -> float:
        """The expected probability of a token whose predecessor has the probability `before`; None: the first one."""
        return self._means[self._level(before)]

    def chain(self, before: float | None, count: int) -> list[float]:
        """The expected probabilities of `count` tokens to come."""
        level, found = self._level(before), list[float]()
        while len(found) < count:
            found.append(self._means[level])
            known, level = level, self._level(found[-1])
            if level == known:  # the rest is the same
                found += [found[-1]] * (count - len(found))
        return found

    def observe(self, before: float | None, probability: float) -> None:
        level = self._level(before)
        self._counts[level] += 1.0
        self._means[level] += max(c.NEXT_RATE, 1.0 / self._counts[level]) * (probability - self._means[level])

    def observe_chain(self, probabilities: Sequence[float]) -> None:
        """Learn from the probabilities of all tokens of a draft."""
        before = None
        for probability in probabilities:
            self.observe(before, probability)
            before = probability

    def to_json(self) -> Any:
        return [self._means, self._counts]

    def restore(self, state: Any) -> None:
        means, counts = ([float(value) for value in part] for part in state)
        if not len(means) == len(counts) == len(c.NEXT_FIRST):
            raise ValueError("the state of expected confidences has another size")
        if not (all(0 <= mean <= 1 for mean in means) and all(count >= 1 for count in counts)):
            raise ValueError("the state of expected confidences has impossible values")
        self._means, self._counts = means, counts

    def _level(self, before: float | None) -> int:
        return 0 if before is None else 1 + bisect_right(c.NEXT_ABOVE, before)

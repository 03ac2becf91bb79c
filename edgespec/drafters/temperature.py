"""The temperature that a draft model samples at, as a factor of the target's: set by hand, or learnt from the text.

A draft only has to agree with the target, and one that is too sure or not sure enough agrees more often at another
temperature than the target's (scripts/lab/measure_draft_temperature.py). Whatever the factor, the
distributions that a draft carries are those that it was sampled from, and a factor changes between drafts by what was
committed before them, so every acceptance rule stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.noise import Stream
from edgespec.sampling import MAX_TEMPERATURE, Sampler
from edgespec.types import Distribution, TokenIds

Factor = float | Literal["auto"]
FACTORS = np.array([0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2])
_MEMORY = 0.9995  # per scored token
_LEAST_WEIGHT, _SURE = 64.0, 2.0  # scored tokens, and standard errors of a gain, before a factor is changed
_EVERY = 4  # drafts, of which one is scored


@dataclass(slots=True)
class Scores:
    """How much better than the target's temperature each factor suited the text [factors], older text fading."""

    weight: float = 0.0
    total: NDArray[np.float64] | float = 0.0
    squares: NDArray[np.float64] | float = 0.0

    def add(self, gains: NDArray[np.float64]) -> None:
        self.weight = self.weight * _MEMORY + 1.0
        self.total = self.total * _MEMORY + gains
        self.squares = self.squares * _MEMORY + gains * gains

    @property
    def best(self) -> float:
        """The factor that gained most beyond what chance may have done; 1 when none did."""
        if self.weight < _LEAST_WEIGHT:
            return 1.0
        mean = self.total / self.weight
        error = np.sqrt(np.maximum(self.squares / self.weight - mean * mean, 0.0) / self.weight)
        sure = mean - _SURE * error
        return float(FACTORS[sure.argmax()]) if sure.max() > 0 else 1.0


class DraftTemperature:
    """Makes the draft's sampler of the target's.

    With "auto" it learns the factor, one for each temperature, from drafts that share the target's noise; other rules
    use what was learnt so. A proper score of the draft's distribution would serve every rule and is no substitute: on
    the demo pair Brier's prefers 1.2, where acceptance is best at 0.9.
    """

    def __init__(self, factor: Factor = 1.0) -> None:
        self._setting = factor
        self._scores: dict[float, Scores] = {}
        self._made: tuple[Sampler, Sampler] | None = None  # the target's, and the last one made of it
        self._drafts = 0
        self._watched: tuple[int, list[int], list[Distribution]] | None = None
        self._used = 1.0

    @property
    def is_learning(self) -> bool:
        """Whether what was drafted is to be told."""
        return self._setting == "auto"

    def factor_at(self, temperature: float) -> float:
        """The factor in use at a temperature of the target's."""
        if self._setting != "auto":
            return self._setting
        return self._scores[temperature].best if temperature in self._scores else 1.0

    def sampler(self, target: Sampler) -> Sampler:
        """The target's settings and noise at the draft's temperature; the target's own where nothing differs."""
        settings = target.sampling
        self._used = self.factor_at(settings.temperature)
        if settings.temperature == 0.0 or self._used == 1.0:
            return target
        # At the highest temperature a distribution is as flat as it gets: what a factor asks for ends there.
        self._used = min(self._used, MAX_TEMPERATURE / settings.temperature)
        temperature = min(settings.temperature * self._used, MAX_TEMPERATURE)
        if self._made is None or self._made[0] is not target or self._made[1].sampling.temperature != temperature:
            made = Sampler(replace(settings, temperature=temperature), target.vocabulary_size, target.noise.offset)
            self._made = target, made
        return self._made[1]

    def drafted(self, start: int, token_ids: Sequence[int], distributions: Sequence[Distribution]) -> None:
        """A draft was raced with the target's noise from `start` on, with what the last sampler gave."""
        self._drafts += 1
        is_watched = self.is_learning and self._drafts % _EVERY == 0
        self._watched = (start, list(token_ids), list(distributions)) if is_watched else None

    def learn(self, target: Sampler, token_ids: TokenIds) -> None:
        """Score the factors on the committed text [n], as far as the last watched draft agrees with it and a token on.

        Under the coupled rule the noise is known, so what each factor would have drafted is too.
        """
        watched, self._watched = self._watched, None
        if watched is None or target.sampling.temperature == 0.0:
            return
        start, drafted, distributions = watched
        scores = self._scores.setdefault(target.sampling.temperature, Scores())
        both = zip(token_ids[start:].tolist(), drafted, distributions, strict=False)
        for position, (told, token_id, distribution) in enumerate(both, start):
            noise = target.noise.exponential(Stream.TARGET, position, distribution.token_ids)
            stood = (picks(distribution, noise, self._used) == told).astype(np.float64)
            scores.add(stood - stood[FACTORS == 1.0])
            if told != token_id:
                return


def picks(distribution: Distribution, noise: NDArray[np.float64], used: float) -> TokenIds:
    """What each of FACTORS would have picked of a distribution [m] made with the factor `used`, with that noise [m].

    The tokens that survived truncation are taken to survive it at every factor.
    """
    times = np.log(noise) - np.outer(used / FACTORS, np.log(distribution.probs))
    found: TokenIds = distribution.token_ids[times.argmin(axis=1)]
    return found

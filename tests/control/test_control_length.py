"""The rate rule against brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from edgespec.control.constants import FORESIGHT
from edgespec.control.prices import Prices, best_length, least_ahead, may_pay


def random_passes(rng: random.Random, widest: int = 40) -> list[float]:
    times = [0.0, 0.05]
    while len(times) <= widest:
        times.append(times[-1] + rng.choice((0.0, 0.001, 0.05)) * rng.random())
    return times


def gain_of(count: int, confidences: list[float], extra_s: float, rate: float) -> float:
    """Expected tokens of a round over a plain one, term by term."""
    expected, reach = 0.0, 1.0
    for confidence in confidences[:count]:
        reach *= confidence
        expected += reach
    return expected - rate * extra_s


def test_best_length_is_what_brute_force_finds() -> None:
    rng = random.Random(0)
    for _ in range(500):
        passes = random_passes(rng)
        confidences = [rng.random() ** 0.3 for _ in range(rng.randrange(0, 16))]
        rate, most = rng.uniform(5.0, 60.0), rng.randrange(0, 20)
        gains = [
            gain_of(count, confidences, passes[1 + count] - passes[1], rate)
            for count in range(min(len(confidences), most) + 1)
        ]
        length, gain = best_length(confidences, Prices(passes, least_ahead(passes), rate), most)
        assert gain == pytest.approx(max(gains), abs=1e-12)
        assert gains[length] == pytest.approx(gain, abs=1e-12)


def test_more_may_pay_where_some_number_of_further_tokens_does() -> None:
    rng = random.Random(1)
    for _ in range(500):
        passes = random_passes(rng)
        rate, token_s, reach = rng.uniform(5.0, 60.0), rng.uniform(0.0, 0.005), rng.random()
        start, confidence = rng.randrange(0, 8), rng.random() ** 0.3
        most = start + rng.randrange(0, 16)
        gains = [0.0]
        for count in range(1, min(FORESIGHT, most - start) + 1):
            extra_s = passes[1 + start + count] - passes[1 + start] + count * token_s
            gains.append(reach * gain_of(count, [confidence] * count, 0.0, 0.0) - rate * extra_s)
        prices = Prices(passes, least_ahead(passes), rate)
        assert may_pay(start, reach, confidence, prices, token_s, most) == (max(gains) > 0)


def test_the_least_that_further_rows_take_is_what_brute_force_finds() -> None:
    rng = random.Random(2)
    for _ in range(50):
        passes = random_passes(rng)
        for width, least_s in enumerate(least_ahead(passes)):
            wider = [(passes[other] - passes[width]) / (other - width) for other in range(width + 1, len(passes))]
            assert least_s == pytest.approx(min(wider, default=math.inf))


def test_confidences_are_asked_for_no_further_than_they_can_pay() -> None:
    passes, asked = [0.0, *(1.0 + 0.2 * k for k in range(40))], []

    def confidences() -> Iterator[float]:
        for _ in range(30):
            asked.append(0.3)
            yield 0.3

    assert best_length(confidences(), Prices(passes, least_ahead(passes), 1.0), 30)[0] == 1
    assert len(asked) == 2  # 0.3 is more than the 0.2 that a further row takes, 0.09 is less

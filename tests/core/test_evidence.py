"""Evidence of a draft model's tokens: grows with the probability of acceptance, and is cheap to compute."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.drafters.growth import evidence_of
from edgespec.sampling.sampler import Sampler
from edgespec.types import Distribution


def logits_with(margin: float, size: int, seed: int = 0) -> np.ndarray:
    """Random logits whose best one leads by `margin`."""
    row = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    row[size // 3] = row.max() + margin
    return row


@pytest.mark.parametrize("size", [10, 300, 4096, 50_003, 128_256])
def test_a_more_confident_draft_has_higher_evidence(size: int) -> None:
    found = [evidence_of(logits_with(margin, size), 1.0, math.inf) for margin in (0.1, 1.0, 3.0, 6.0)]
    odds, own, lead = zip(*found, strict=True)
    assert list(odds) == sorted(odds) and odds[0] < odds[-1]
    assert lead == pytest.approx((0.025, 0.25, 0.75, 1.5), abs=1e-6)
    assert own == (0.0,) * 4


def test_the_odds_of_a_short_row_are_those_of_its_softmax() -> None:
    row = logits_with(1.5, 200)
    weights = np.exp(row - row.max())
    top = 1.0 / weights.sum()
    assert evidence_of(row, 0.7, 0.4)[0] == pytest.approx(math.log(top / (1 - top)) / 2, abs=1e-5)


def test_a_larger_margin_is_accepted_more_often() -> None:
    """Draft and target run the same race with their own probabilities."""
    sampler, rng = Sampler(Sampling(seed=1), 100), np.random.default_rng(1)
    leads, agrees = [], []
    for position in range(3000):
        logits = rng.standard_normal(30)
        draft, target = (np.exp(row) / np.exp(row).sum() for row in (logits, logits + 0.4 * rng.standard_normal(30)))
        ids = np.arange(30, dtype=np.int32)
        token_id, lead = sampler.race(Distribution(ids, draft), position)
        leads.append(lead)
        agrees.append(token_id == sampler.pick(Distribution(ids, target), position))
    order = np.argsort(leads)
    thirds = [np.mean(np.array(agrees)[part]) for part in np.array_split(order, 3)]
    assert thirds[0] + 0.1 < thirds[1] + 0.05 < thirds[2]

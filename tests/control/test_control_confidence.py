"""Calibration: from evidence to probabilities that are borne out; drafts that only the text judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest

from edgespec.control.confidence import Logistic, UnusedDrafts
from edgespec.drafters.growth import evidence_of
from edgespec.types import Draft, Evidence
from simulation import Text, always, beta_chances, bursts, honest, made_up, opposite, recorded

TEXTS = recorded()


def outcomes(texts: Iterable[Text], length: int = 8) -> Iterable[tuple[Evidence, bool]]:
    """(evidence, accepted) of every token that drafts of `length` decide along the texts."""
    for text in texts:
        position = text.prompt_tokens + 1
        while position < text.token_ids.size:
            drafted = min(length, int(text.token_ids.size) - position)
            accepted = min(text.agreed[position], drafted)
            for index in range(min(accepted + 1, drafted)):
                yield text.evidence[position][index], index < accepted
            position += accepted + 1


def learnt(calibrator: Logistic, found: Iterable[tuple[Evidence, bool]]) -> tuple[np.ndarray, np.ndarray]:
    """(predicted, what came) of each outcome, every one predicted before it is learnt from."""
    predicted, came = [], []
    for evidence, accepted in found:
        predicted.append(calibrator.predictor()(evidence))
        came.append(accepted)
        calibrator.observe(evidence, accepted=accepted)
    return np.array(predicted), np.array(came, float)


def calibration_error(predicted: np.ndarray, came: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error over bins of equal size."""
    parts = np.array_split(np.argsort(predicted), bins)
    return sum(part.size * abs(predicted[part].mean() - came[part].mean()) for part in parts) / predicted.size


def area_under_curve(predicted: np.ndarray, came: np.ndarray) -> float:
    """Probability that an accepted token was given more than a refused one."""
    good, bad = predicted[came == 1], predicted[came == 0]
    return float(((good[:, None] > bad).mean() + (good[:, None] >= bad).mean()) / 2)


@pytest.mark.parametrize("make_texts", [
    lambda: [made_up(3000, beta_chances(0.6, 1), honest, 1)],
    lambda: [made_up(3000, beta_chances(0.9, 2), honest, 2)],
    lambda: [made_up(3000, beta_chances(0.5, 3, 0.5), opposite, 3)],
    lambda: [made_up(3000, [0.1] * 3000, always(0.9), 4)],
    lambda: [made_up(3000, bursts(0.95, 0.05, 40, 5), always(0.8), 5)],
], ids=["honest", "good", "opposite", "boastful", "bursts"])  # fmt: skip
def test_a_logistic_becomes_calibrated(make_texts: Callable[[], Sequence[Text]]) -> None:
    predicted, came = learnt(Logistic(), outcomes(make_texts()))
    later = slice(predicted.size // 4, None)
    assert calibration_error(predicted[later], came[later]) < 0.05


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_scores_of_a_real_draft_tell_what_will_stand(temperature: float) -> None:
    """Recorded evidence of the demo draft, a stream of all domains, learnt from nothing."""
    texts = [text for by_heat in TEXTS.values() for text in by_heat[temperature]]
    predicted, came = learnt(Logistic(), outcomes(texts))
    assert calibration_error(predicted, came) < 0.05
    assert area_under_curve(predicted, came) > 0.85


def test_a_logistic_follows_stretches_that_the_evidence_does_not_show() -> None:
    """Good and bad stretches of 40 tokens under one unchanging claim."""
    predicted, came = learnt(Logistic(), outcomes([made_up(4000, bursts(0.95, 0.05, 40, 7), always(0.8), 7)]))
    assert area_under_curve(predicted, came) > 0.8


def test_a_logistic_stays_inside_its_bounds() -> None:
    calibrator = Logistic()
    for _ in range(2000):
        calibrator.observe((100.0, -100.0), accepted=True)
    assert 0.0 < calibrator.predictor()((-1e6, 1e6)) < calibrator.predictor()((1e6, -1e6)) < 1.0


# -- drafts that were not verified


def add(drafts: UnusedDrafts, token_ids: list[int], start: int) -> None:
    drafts.add("ngram", start, Draft.chain(token_ids, evidence=[(2.0,)] * len(token_ids)))


def resolved(drafts: UnusedDrafts, text: list[int]) -> list[tuple[list[int], int]]:
    return [(draft.token_ids.tolist(), agreed) for _, draft, agreed in drafts.resolved(np.array(text, np.int32), ())]


def test_a_draft_is_judged_once_where_the_text_differs_or_has_all_of_it() -> None:
    drafts = UnusedDrafts()
    drafts.add("ngram", 1, Draft.chain([]))  # an empty one is none
    add(drafts, [5, 6, 7, 8], start=3)
    assert resolved(drafts, [1, 2, 3]) == resolved(drafts, [1, 2, 3, 5]) == []
    assert resolved(drafts, [1, 2, 3, 5, 6, 9]) == [([5, 6, 7, 8], 2)]
    assert resolved(drafts, [1, 2, 3, 5, 6, 9, 8]) == []
    for token_ids, start in (([5, 6, 7], 1), ([6, 9], 2), ([4], 1)):
        add(drafts, token_ids, start)
    assert resolved(drafts, [1, 5]) == [([4], 0)]
    assert sorted(resolved(drafts, [1, 5, 6, 7, 8])) == [([5, 6, 7], 3), ([6, 9], 1)]
    add(drafts, [5], start=1)
    drafts.clear()
    assert resolved(drafts, [1, 5]) == []
    for start in range(200):
        add(drafts, [1] * 400, start)
    assert len(resolved(drafts, [2] * 500)) == 64, "only so many are kept waiting"


# -- evidence of a draft model's tokens: grows with the probability of acceptance, and is cheap to compute


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

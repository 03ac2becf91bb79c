"""Calibration: from evidence to probabilities that are borne out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest

from edgespec.control.confidence import BetaTable, Calibrator, Logistic
from edgespec.types import Evidence
from simulation import Text, always, beta_chances, bursts, honest, made_up, opposite, recorded

TEXTS = recorded()


def outcomes(texts: Iterable[Text], length: int = 8) -> Iterable[tuple[int, Evidence, bool]]:
    """(index, evidence, accepted) of every token that drafts of `length` decide along the texts."""
    for text in texts:
        position = text.prompt_tokens + 1
        while position < text.token_ids.size:
            drafted = min(length, int(text.token_ids.size) - position)
            accepted = min(text.agreed[position], drafted)
            for index in range(min(accepted + 1, drafted)):
                yield index, text.evidence[position][index], index < accepted
            position += accepted + 1


def learnt(calibrator: Calibrator, found: Iterable[tuple[int, Evidence, bool]]) -> tuple[np.ndarray, np.ndarray]:
    """(predicted, what came) of each outcome, every one predicted before it is learnt from."""
    predicted, came = [], []
    for index, evidence, accepted in found:
        predicted.append(calibrator.probability(index, evidence))
        came.append(accepted)
        calibrator.observe(index, evidence, accepted=accepted)
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
        calibrator.observe(0, (100.0, -100.0), accepted=True)
    assert 0.0 < calibrator.probability(0, (-1e6, 1e6)) < calibrator.probability(0, (1e6, -1e6)) < 1.0


def test_a_copying_drafter_is_judged_by_class_and_position() -> None:
    table = BetaTable()
    for _ in range(60):
        table.observe(0, (4.0,), accepted=True)
        table.observe(0, (2.0,), accepted=False)
        table.observe(8, (4.0,), accepted=False)
    assert table.probability(0, (4.0,)) > 0.9
    assert table.probability(0, (2.0,)) < 0.1
    assert table.probability(8, (4.0,)) < 0.2
    assert table.probability(0, (3.0,)) == pytest.approx(0.5)  # of this class nothing is known


def test_what_a_class_shows_is_the_prior_of_its_positions() -> None:
    table = BetaTable()
    for _ in range(30):
        table.observe(0, (3.0,), accepted=True)
    assert table.probability(4, (3.0,)) > 0.9


def test_old_outcomes_of_a_table_fade() -> None:
    table = BetaTable()
    for _ in range(300):
        table.observe(0, (4.0,), accepted=True)
    for _ in range(60):
        table.observe(0, (4.0,), accepted=False)
    assert table.probability(0, (4.0,)) < 0.4


def test_a_predictor_says_what_is_known_when_it_is_asked_for() -> None:
    rng = np.random.default_rng(0)
    for calibrator, size in ((BetaTable(), 1), (Logistic(), 3)):
        for _ in range(100):
            evidence = tuple(rng.integers(2, 5, size).astype(float).tolist())
            calibrator.observe(int(rng.integers(0, 12)), evidence, accepted=bool(rng.random() < 0.6))
        chain = [tuple(rng.integers(2, 5, size).astype(float).tolist()) for _ in range(16)]
        one_by_one = [calibrator.probability(index, evidence) for index, evidence in enumerate(chain)]
        assert list(map(calibrator.predictor(), range(16), chain)) == pytest.approx(one_by_one)
        calibrator.observe(0, chain[0], accepted=False)
        later = calibrator.predictor()(0, chain[0])
        assert later == pytest.approx(calibrator.probability(0, chain[0])) != one_by_one[0]
        calibrator.restore(type(calibrator)().to_json())
        assert calibrator.predictor()(0, chain[0]) == pytest.approx(calibrator.probability(0, chain[0]))


@pytest.mark.parametrize("make", [BetaTable, Logistic])
def test_a_calibrator_goes_on_from_its_state(make: Callable[[], Calibrator]) -> None:
    first, second = make(), make()
    size = 1 if make is BetaTable else 3
    for index in range(50):
        first.observe(index % 9, (2.0,) * size, accepted=index % 3 > 0)
    second.restore(first.to_json())
    assert second.to_json() == first.to_json()


@pytest.mark.parametrize("state", [3, None, [1, 2], [[1]], {"a": 1}, [[1.0], [1.0], [], [], []]])
def test_a_state_of_something_else_is_refused(state: object) -> None:
    for calibrator in (BetaTable(), Logistic()):
        before = calibrator.to_json()
        with pytest.raises((ValueError, TypeError, KeyError, IndexError)):
            calibrator.restore(state)
        assert calibrator.to_json() == before

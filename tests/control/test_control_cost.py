"""What passes cost: a curve that never falls, follows the machine and is not moved by outliers; measured and kept."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from edgespec.control.constants import LEAST_PASSES, UNTOLD_PASSES
from edgespec.control.cost import WIDEST, ContextCost, CostCurve
from edgespec.control.draft_cost import DraftCost, RoundCost
from edgespec.control.measure import (
    COARSE,
    WIDTHS,
    cost_key,
    draft_cost,
    quick_costs,
    smoothed,
    store_curve,
    target_curve,
)
from edgespec.platform.disk_cache import cache_folder
from edgespec.types import Batch, Logits
from table_engine import TableEngine

STEPS = {1: 1.0, 2: 1.4, 4: 1.5, 5: 2.5, 8: 2.6}


def test_measured_widths_are_kept_and_others_lie_between() -> None:
    curve = CostCurve(STEPS)
    assert [curve.at(width) for width in STEPS] == pytest.approx(list(STEPS.values()))
    assert curve.at(3) == pytest.approx(1.45)
    assert curve.at(11) == pytest.approx(2.6 + 3 * (2.6 - 2.5) / 3)
    assert curve.table(0)[0] == 0.0
    assert len(curve.table(0)) == WIDEST + 1


def test_what_a_round_costs_besides_its_pass_is_told_from_what_its_tokens_cost() -> None:
    cost = RoundCost()
    for _ in range(50):
        cost.decoded(0.001)
        cost.speculated(4, 4 * 0.001 + 0.003)
    assert cost.token_s == pytest.approx(0.001)
    assert cost.round_s == pytest.approx(0.003, rel=0.01)
    assert cost.speculated(5, 0.004) == 0.0
    assert RoundCost.from_json(json.loads(json.dumps(cost.to_json()))) == cost


@pytest.mark.parametrize("kept", [None, 3, [], [1.0], [-1.0, 0.1], ["a", "b"], [0.1, math.nan], [0.1, 2.0]])
def test_a_round_cost_that_was_kept_badly_is_forgotten(kept: object) -> None:
    assert RoundCost.from_json(kept) == RoundCost()


def test_passes_that_surprise_three_times_in_a_row_are_believed_and_one_is_not() -> None:
    curve = CostCurve(STEPS)
    for _ in range(5):
        curve.observe(1, 0, 1.0)
    assert curve.is_sure_of_plain()
    curve.observe(1, 0, 0.3)
    assert not curve.is_sure_of_plain()
    assert curve.at(1) > 0.9
    curve.observe(1, 0, 1.0)
    assert curve.is_sure_of_plain()
    curve.observe(1, 0, 3.0)
    assert curve.is_sure_of_plain(), "a slow plain pass makes no draft look better than it is"
    curve.observe(1, 0, 1.0)
    for _ in range(3):
        curve.observe(1, 0, 3.0)
    assert curve.is_sure_of_plain()
    assert curve.at(1) == pytest.approx(3.0, rel=0.15)


def late(width: int, times: int, before: int = 8) -> CostCurve:
    """A curve that knows plain passes and `width`, and then saw `times` passes of it take twice as long."""
    curve = CostCurve(STEPS)
    for _ in range(before):
        curve.observe(1, 0, 1.0)
        curve.observe(width, 0, STEPS[width])
    for _ in range(times):
        curve.observe(width, 0, 2.0 * STEPS[width])
    return curve


def test_a_plain_pass_tells_whether_wide_passes_are_late_or_the_machine_is() -> None:
    curve = late(4, 3)
    assert not curve.is_sure_of_plain(), "a plain pass is asked for"
    curve.observe(1, 0, 2.0)
    assert curve.is_sure_of_plain()
    for _ in range(30):
        curve.observe(1, 0, 1.0)
    assert curve.at(4) / curve.at(1) == pytest.approx(STEPS[4], rel=0.1)
    curve = late(4, 3)
    curve.observe(1, 0, 1.0)
    assert curve.is_sure_of_plain()
    assert curve.at(4) / curve.at(1) > 1.5 * STEPS[4]


def test_a_wide_pass_in_time_ends_the_doubt_about_its_width() -> None:
    curve = late(4, 3)
    curve.observe(4, 0, STEPS[4])
    assert curve.is_sure_of_plain()
    curve.observe(1, 0, 1.0)
    assert curve.at(4) / curve.at(1) < 1.5 * STEPS[4]


def test_wide_passes_that_stay_late_are_believed_where_no_plain_pass_follows() -> None:
    curve = late(4, UNTOLD_PASSES + 1)
    assert curve.is_sure_of_plain()
    assert curve.at(4) / curve.at(1) > 1.5 * STEPS[4]


def test_a_table_never_falls_whatever_was_measured_or_seen() -> None:
    """A narrow pass can be padded to a wider one, so it never costs more."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        curve = CostCurve({int(width): float(rng.uniform(0.5, 3.0)) for width in rng.choice(33, 6, replace=False) + 1})
        for _ in range(50):
            curve.observe(int(rng.integers(1, 40)), int(rng.integers(0, 2000)), float(rng.uniform(0.1, 9.0)))
            table = curve.table(int(rng.integers(0, 2000)))
            assert all(low <= high for low, high in pairwise(table))
            assert table[1] > 0


def test_one_measured_width_is_enough() -> None:
    curve = CostCurve({1: 0.5})
    assert curve.at(1) == 0.5
    assert curve.at(8) == pytest.approx(4.0)


@pytest.mark.parametrize("measured", [{}, {0: 1.0}, {1: 0.0}, {1: 1.0, 2: -1.0}])
def test_what_is_no_measurement_is_refused(measured: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        CostCurve(measured)


def test_context_adds_to_a_pass() -> None:
    curve = CostCurve(STEPS, ContextCost(fixed_s=0.001, row_s=0.0001))
    assert curve.at(1, 640) == pytest.approx(1.0 + 640 * 0.0011)
    assert curve.at(8, 640) == pytest.approx(2.6 + 640 * 0.0018)


def test_a_slower_machine_shows_at_every_width() -> None:
    curve = CostCurve(STEPS)
    for _ in range(300):
        curve.observe(1, 0, 1.5)
        curve.observe(4, 0, 1.5 * 1.5)
    assert curve.at(1) == pytest.approx(1.5, rel=0.02)
    assert curve.at(4) == pytest.approx(2.25, rel=0.02)
    assert curve.at(8) == pytest.approx(2.6 * 1.5, rel=0.25)  # never seen since, but the machine is the same


def test_a_width_that_was_measured_wrongly_is_corrected() -> None:
    curve = CostCurve(STEPS)
    for _ in range(300):
        curve.observe(1, 0, 1.0)
        curve.observe(8, 0, 4.0)
    assert curve.at(8) == pytest.approx(4.0, rel=0.05)
    assert curve.at(1) == pytest.approx(1.0, rel=0.05)


def test_noise_makes_wide_passes_neither_dearer_nor_alike() -> None:
    """Drafts of all lengths, 60 passes in all, each off by 15%: as much as a busy laptop's."""
    true, errors = CostCurve({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.5, 16: 2.1}), []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        curve = CostCurve({width: s * math.exp(0.1 * rng.standard_normal()) for width, s in true.measured.items()})
        for _ in range(60):
            width = int(rng.integers(1, 17))
            curve.observe(width, 0, true.at(width) * math.exp(0.15 * rng.standard_normal()))
        table = curve.table(0)
        errors.append([math.log(table[width] / table[1] / true.at(width)) for width in (4, 8, 12, 16)])
    assert np.abs(np.mean(errors, axis=0)).max() < 0.04
    assert np.std(errors, axis=0).max() < 0.12


def test_outliers_hardly_move_it() -> None:
    """A hundredth of the passes take a hundred times as long."""
    rng, curve = np.random.default_rng(0), CostCurve(STEPS)
    for _ in range(2000):
        width = int(rng.choice([1, 2, 4, 8]))
        late = 100.0 if rng.random() < 0.01 else 1.0
        curve.observe(width, 0, STEPS[width] * late * math.exp(0.05 * rng.standard_normal()))
    for width in (1, 2, 4, 8):
        assert curve.at(width) == pytest.approx(STEPS[width], rel=0.1)
    before = curve.at(1)
    curve.observe(1, 0, 1e6)
    assert curve.at(1) < 1.06 * before


@pytest.mark.parametrize("seen", [(0, 0, 1.0), (WIDEST + 1, 0, 1.0), (1, 0, 0.0), (1, 0, -1.0)])
def test_what_cannot_have_been_a_pass_is_not_learnt_from(seen: tuple[int, int, float]) -> None:
    curve = CostCurve(STEPS)
    curve.observe(*seen)
    assert curve.table(0) == CostCurve(STEPS).table(0)


def test_what_was_refined_is_where_the_next_run_begins() -> None:
    curve = CostCurve(STEPS)
    for _ in range(200):
        curve.observe(8, 0, 4.0)
        curve.observe(1, 0, 1.0)
    again = CostCurve(curve.refined())
    assert again.at(8) / again.at(1) == pytest.approx(curve.at(8) / curve.at(1), rel=0.05)


def test_a_drafted_token_and_a_read_one_are_told_apart() -> None:
    cost = DraftCost(0.004, 0.001)
    for _ in range(300):
        cost.observe(4, 1, 4 * 0.002 + 1 * 0.0005)
        cost.observe(2, 100, 2 * 0.002 + 100 * 0.0005)
    assert cost.token_s == pytest.approx(0.002, rel=0.1)
    assert cost.read_s == pytest.approx(0.0005, rel=0.1)
    assert cost.of(3, 10) == pytest.approx(3 * cost.token_s + 10 * cost.read_s)


def test_one_slow_draft_does_not_make_a_drafter_dear() -> None:
    cost = DraftCost(0.002, 0.0005)
    for _ in range(20):
        cost.observe(1, 0, 0.002)
    cost.observe(1, 0, 5.0)
    assert cost.token_s < 0.0026
    cost.observe(0, 3, 1.0)  # nothing was drafted, so nothing is known of a token
    assert cost.token_s < 0.0026


def test_a_cost_that_was_unknown_is_what_is_seen_first() -> None:
    cost = DraftCost()
    cost.observe(4, 0, 0.008)
    assert cost.token_s == pytest.approx(0.002)


class Counting(TableEngine):
    """Counts passes by width."""

    passes = 0

    def forward(self, batch: Batch) -> Logits:
        self.passes += 1
        return super().forward(batch)


def test_a_kink_of_noise_is_drawn_to_the_line_and_a_step_is_not() -> None:
    line = {width: 1.0 + 0.07 * (width - 1) for width in COARSE}
    assert smoothed(line) == pytest.approx(line)
    noisy = {**line, 4: line[4] * 1.06, 5: line[5] * 0.96}
    found = smoothed(noisy)
    assert found[5] / found[4] > 1.02 > 1.0 > noisy[5] / noisy[4]
    steps = {1: 1.0, 2: 1.95, 4: 2.2, 5: 3.4, 8: 3.6, 16: 5.5}
    assert smoothed(steps) == pytest.approx(steps, rel=0.06)
    assert smoothed({1: 1.0, 8: 3.0}) == {1: 1.0, 8: 3.0}


@pytest.fixture
def engine() -> Counting:
    return Counting.random(10, context_length=64, max_batch=8)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"weights")
    return path


def test_every_width_that_fits_is_measured_and_the_engine_left_empty(engine: Counting) -> None:
    costs = quick_costs(engine, WIDTHS, passes=LEAST_PASSES)
    assert set(costs) == {width for width in WIDTHS if width <= 8}
    assert min(costs.values()) > 0
    assert engine.length() == 0
    assert engine.passes >= LEAST_PASSES


@pytest.mark.parametrize("plain_s", [0.002, 0.05])
def test_where_passes_are_long_fewer_widths_are_measured_several_times(
    monkeypatch: pytest.MonkeyPatch, weights: Path, plain_s: float
) -> None:
    widths: list[int] = []

    class Slow(TableEngine):
        def forward(self, batch: Batch) -> Logits:
            widths.append(batch.width)
            return super().forward(batch)

    monkeypatch.setattr("edgespec.control.measure.perf_counter", lambda: plain_s * len(widths))
    engine = Slow.random(10, context_length=64, max_batch=32)
    measured = target_curve(engine, [weights]).measured
    assert set(measured) == set(COARSE if plain_s > 0.01 else WIDTHS)
    assert all(widths.count(width) >= 3 for width in measured)
    assert plain_s * len(widths) <= 2.0


def test_a_curve_is_measured_once(engine: Counting, weights: Path) -> None:
    first = target_curve(engine, [weights])
    passes = engine.passes
    again = target_curve(engine, [weights])
    assert engine.passes == passes
    assert again.table(0) == first.table(0)


def test_what_a_run_learnt_is_recalled(engine: Counting, weights: Path) -> None:
    curve = target_curve(engine, [weights])
    for _ in range(100):
        curve.observe(8, 0, 3 * curve.at(8))
    store_curve(cost_key(engine, [weights]), curve)
    assert target_curve(engine, [weights]).measured == pytest.approx(curve.refined())


def test_a_curve_that_a_busy_machine_showed_is_measured_again(engine: Counting, weights: Path) -> None:
    store_curve(cost_key(engine, [weights]), CostCurve({1: 1.0, 8: 1.1}))
    assert target_curve(engine, [weights]).at(1) < 0.5
    assert target_curve(engine, [weights]).at(8) < 0.5


CORRUPT = (
    *("", "{", "null", "[]", "{}", "NaN", '{"widths": {"1": 1}}', '{"widths": {}, "context": [0, 0]}'),
    *('{"widths": {"1": -1}, "context": [0, 0]}', '{"widths": {"x": 1}, "context": [0, 0]}'),
)


@pytest.mark.parametrize("text", CORRUPT)
def test_a_corrupt_cache_is_measured_anew(engine: Counting, weights: Path, text: str) -> None:
    file = cache_folder() / "costs" / f"{cost_key(engine, [weights])}.json"
    target_curve(engine, [weights])
    assert file.exists()
    file.write_text(text)
    passes = engine.passes
    assert target_curve(engine, [weights]).at(8) > 0
    assert engine.passes > passes
    assert file.read_text() != text


def test_other_weights_have_other_costs(engine: Counting, weights: Path) -> None:
    before = cost_key(engine, [weights])
    weights.write_bytes(b"other weights")
    assert cost_key(engine, [weights]) != before


@pytest.mark.parametrize("text", ["[1]", '["a", "b"]', "[0, 0]", "[-1.0, 1.0]", "{}"])
def test_a_drafts_costs_are_kept_and_a_corrupt_entry_is_measured_anew(
    engine: Counting, weights: Path, text: str
) -> None:
    first = draft_cost(engine, [weights])
    passes = engine.passes
    assert draft_cost(engine, [weights]) == first
    assert engine.passes == passes
    (cache_folder() / "draft costs" / f"{cost_key(engine, [weights])}.json").write_text(text)
    found = draft_cost(engine, [weights])
    assert engine.passes > passes
    assert found.token_s > 0 and found.read_s > 0

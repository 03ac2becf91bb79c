"""What passes cost: a curve that never falls, follows the machine and is not moved by outliers; measured and kept."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.control.auto import AutoController
from edgespec.control.base import NOTHING
from edgespec.control.constants import FIRST_ROW, START_PASSES, START_S
from edgespec.control.cost import WIDEST, CostCurve, DraftCost
from edgespec.control.pool import cost_key
from edgespec.control.prices import RunCosts
from edgespec.drafters.ngram import NgramDrafter
from edgespec.platform.disk_cache import file_key
from edgespec.reports import RoundRecord
from edgespec.types import Verdict
from simulation import known_curve
from table_engine import TableEngine


def table(curve: CostCurve) -> list[float]:
    return [curve.at(width) for width in range(WIDEST + 1)]


STEPS = {1: 1.0, 2: 1.4, 4: 1.5, 5: 2.5, 8: 2.6}


def test_measured_widths_are_kept_and_others_lie_between() -> None:
    curve = known_curve(STEPS)
    assert [curve.at(width) for width in STEPS] == pytest.approx(list(STEPS.values()))
    assert curve.at(3) == pytest.approx(1.45)
    assert curve.at(11) == pytest.approx(2.6 + 3 * (2.6 - 2.5) / 3)
    assert table(curve)[0] == 0.0
    assert len(table(curve)) == WIDEST + 1


def late(width: int, times: int, before: int = 8) -> CostCurve:
    """A curve that knows plain passes and `width`, and then saw `times` passes of it take twice as long."""
    curve = known_curve(STEPS)
    for _ in range(before):
        curve.observe(1, 1.0)
        curve.observe(width, STEPS[width])
    for _ in range(times):
        curve.observe(width, 2.0 * STEPS[width])
    return curve


def test_a_plain_pass_tells_whether_wide_passes_are_late_or_the_machine_is() -> None:
    curve = late(4, 3)
    assert not curve.is_sure_of_plain, "a plain pass is asked for"
    curve.observe(1, 2.0)
    assert curve.is_sure_of_plain
    for _ in range(30):
        curve.observe(1, 1.0)
    assert curve.at(4) / curve.at(1) == pytest.approx(STEPS[4], rel=0.1)
    curve = late(4, 3)
    curve.observe(1, 1.0)
    assert curve.is_sure_of_plain
    assert curve.at(4) / curve.at(1) > 1.5 * STEPS[4]


def test_a_table_never_falls_whatever_was_measured_or_seen() -> None:
    """A narrow pass can be padded to a wider one, so it never costs more."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        curve = known_curve(
            {int(width): float(rng.uniform(0.5, 3.0)) for width in rng.choice(33, 6, replace=False) + 1}
        )
        for _ in range(50):
            curve.observe(int(rng.integers(1, 40)), float(rng.uniform(0.1, 9.0)))
            times = table(curve)
            assert all(low <= high for low, high in pairwise(times))
            assert times[1] > 0


def test_noise_makes_wide_passes_neither_dearer_nor_alike() -> None:
    """Drafts of all lengths, 60 passes in all, each off by 15%: as much as a busy laptop's."""
    true, errors = known_curve({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.5, 16: 2.1}), []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        curve = known_curve(
            {
                width: s * math.exp(0.1 * rng.standard_normal())
                for width, s in ((width, true.at(width)) for width in (1, 2, 4, 8, 16))
            }
        )
        for _ in range(60):
            width = int(rng.integers(1, 17))
            curve.observe(width, true.at(width) * math.exp(0.15 * rng.standard_normal()))
        times = table(curve)
        errors.append([math.log(times[width] / times[1] / true.at(width)) for width in (4, 8, 12, 16)])
    assert np.abs(np.mean(errors, axis=0)).max() < 0.04
    assert np.std(errors, axis=0).max() < 0.14


def test_outliers_hardly_move_it() -> None:
    """A hundredth of the passes take a hundred times as long."""
    rng, curve = np.random.default_rng(0), known_curve(STEPS)
    for _ in range(2000):
        width = int(rng.choice([1, 2, 4, 8]))
        late = 100.0 if rng.random() < 0.01 else 1.0
        curve.observe(width, STEPS[width] * late * math.exp(0.05 * rng.standard_normal()))
    for width in (1, 2, 4, 8):
        assert curve.at(width) == pytest.approx(STEPS[width], rel=0.1)
    before = curve.at(1)
    curve.observe(1, 1e6)
    assert curve.at(1) < 1.06 * before


@pytest.mark.parametrize("seen", [(0, 1.0), (WIDEST + 1, 1.0), (1, 0.0), (1, -1.0)])
def test_what_cannot_have_been_a_pass_is_not_learnt_from(seen: tuple[int, float]) -> None:
    curve = known_curve(STEPS)
    curve.observe(*seen)
    assert table(curve) == table(known_curve(STEPS))


def test_a_drafted_token_and_a_read_one_are_told_apart() -> None:
    cost = DraftCost(0.004, 0.001)
    for _ in range(300):
        cost.observe(4, 1, 4 * 0.002 + 1 * 0.0005)
        cost.observe(2, 100, 2 * 0.002 + 100 * 0.0005)
    assert cost.token_s == pytest.approx(0.002, rel=0.1)
    assert cost.read_s == pytest.approx(0.0005, rel=0.1)
    assert cost.of(3, 10) == pytest.approx(3 * cost.token_s + 10 * cost.read_s)


def test_other_weights_have_other_costs(tmp_path: Path) -> None:
    engine, weights = TableEngine.random(10, context_length=64), tmp_path / "weights.gguf"
    weights.write_bytes(b"weights")
    before = cost_key(engine, [file_key(weights)])
    weights.write_bytes(b"other weights")
    assert cost_key(engine, [file_key(weights)]) != before


# -- a first run, which begins with a guess


def fed(row: float, passes: int = 12, plain_s: float = 0.02) -> CostCurve:
    """A prior that saw plain passes and then some of widths 2 to 5, each row taking `row` of a plain pass."""
    curve = CostCurve(1.0)
    for _ in range(3):
        curve.observe(1, plain_s)
    for index in range(passes):
        width = 2 + index % 4
        curve.observe(width, plain_s * (1 + row * (width - 1)))
    return curve


def test_nothing_is_risked_before_plain_passes_were_timed() -> None:
    curve = CostCurve(1.0)
    assert not curve.is_scaled and not curve.is_sure_of_plain
    curve.observe(1, 0.5)  # the first pass of a run waits for its weights
    assert not curve.is_sure_of_plain
    curve.observe(1, 0.02)
    assert curve.is_sure_of_plain
    assert curve.at(1) == pytest.approx(0.02)
    assert curve.at(5) == pytest.approx(0.02 * (1 + 4 * FIRST_ROW))


@pytest.mark.parametrize("row", [0.05, 0.2, 0.45, 0.9])
def test_what_rows_cost_is_learnt_for_widths_that_were_not_run(row: float) -> None:
    curve = fed(row)
    assert curve.at(4) / curve.at(1) == pytest.approx(1 + 3 * row, rel=0.1)
    assert curve.at(8) / curve.at(1) == pytest.approx(1 + 7 * row, rel=0.2)
    assert table(curve) == sorted(table(curve))


def test_a_width_that_was_run_says_for_itself_what_it_costs() -> None:
    curve = fed(0.2)
    for _ in range(12):
        curve.observe(6, 0.02 * 4)  # a step in the kernel
        if not curve.is_sure_of_plain:
            curve.observe(1, 0.02)
    assert curve.at(6) / curve.at(1) == pytest.approx(4, rel=0.1)
    assert curve.at(4) / curve.at(1) == pytest.approx(1.6, rel=0.15)


def test_rows_up_to_the_padding_are_one_pass() -> None:
    curve = CostCurve(1.0, low=2)
    for width in (1, 2):
        curve.observe(width, 0.02)
    assert curve.at(1) == curve.at(2) == pytest.approx(0.02)
    assert curve.at(3) == pytest.approx(0.02 * (1 + FIRST_ROW))


def test_what_was_learnt_goes_on_in_the_next_run() -> None:
    curve = fed(0.1)
    again = CostCurve.from_json(json.loads(json.dumps(curve.to_json())))
    assert again is not None and again.is_scaled
    assert table(again) == pytest.approx(table(curve), rel=1e-6)
    assert not again.is_sure_of_plain  # the machine may be another one today


@pytest.mark.parametrize(
    "damage",
    [
        *({"plain": 0}, {"plain": "x"}, {"plain": math.inf}, {"seen": -1}, {"seen": 1.5}),
        *({"rows": [1]}, {"rows": 3}, {"rows": [-0.1] * (WIDEST + 1)}, {"rows": [1e9] * (WIDEST + 1)}),
    ],
)
def test_a_damaged_entry_is_a_missing_one(damage: dict[str, object]) -> None:
    assert CostCurve.from_json(fed(0.1).to_json() | damage) is None
    for kept in (None, [], 3, {}, "text"):
        assert CostCurve.from_json(kept) is None


def test_the_first_plain_passes_say_what_the_bank_and_the_drafts_are_worth() -> None:
    curve, cost = CostCurve(1.0), DraftCost.guessed(0.1)
    controller = AutoController({"draft": NgramDrafter()}, RunCosts(curve, {"draft": cost}), clock=lambda: 0.0)
    controller.begin(np.arange(3, dtype=np.int32))
    assert cost.is_relative
    for position in range(3, 6):
        controller.observe(NOTHING, Verdict((), 1), RoundRecord(position, None, 0, 0, (), 0.0, 0.02))
    assert controller.bank.balance_s == pytest.approx(max(START_PASSES * 0.02, START_S), rel=0.05)
    assert controller.costs.draft("draft") is cost
    assert 0 < cost.read_s < cost.token_s < 0.02


def test_a_guess_follows_the_plain_pass_until_a_draft_was_timed() -> None:
    """The first plain passes may be late; a guess that kept their time would look dear and would never be tried."""
    costs = RunCosts(CostCurve(1.0), {"draft": DraftCost.guessed(0.1)})
    for _ in range(3):
        costs.curve.observe(1, 0.04)
    late = costs.draft("draft").token_s, costs.draft("draft").read_s
    for _ in range(100):
        costs.curve.observe(1, 0.02)
    cost = costs.draft("draft")
    assert (cost.token_s, cost.read_s) == pytest.approx((late[0] / 2, late[1] / 2), rel=0.02)
    costs.share_passes(4, 3)
    shared_s = costs.draft("draft").token_s
    costs.share_passes(1, 0)
    assert 0.25 * cost.token_s < shared_s < cost.token_s
    cost.observe(2, 0, 2 * 0.003)
    timed = costs.draft("draft").token_s
    for _ in range(100):
        costs.curve.observe(1, 0.01)
    assert costs.draft("draft").token_s == timed


def test_a_stall_of_the_first_round_is_not_what_rounds_take() -> None:
    """If it were believed, no draft might ever seem to pay again, and no round would put that right."""
    costs = RunCosts(CostCurve(0.02), {})
    costs.choosing_s = 0.001
    assert costs.observe_round(2, 0.5) == pytest.approx(0.498), "but it is charged"
    assert costs.round_s == pytest.approx(0.04)
    costs.observe_round(2, 0.102)
    assert costs.round_s == pytest.approx(0.1), "rounds that always take long are believed"


def test_a_late_first_pass_is_believed_in_part_only() -> None:
    """Memory is allocated for a new width; if that passed for its cost, no draft would ever be verified again."""
    curve, sound = fed(0.1, passes=0), fed(0.1, passes=1)
    assert not curve.is_sure_of_rows
    curve.observe(2, 0.02 * 4)
    assert curve.at(3) / curve.at(1) < 1 + 2 * 0.45 and not curve.is_sure_of_rows
    for late in (curve, sound):
        late.observe(3, 0.02 * 1.2)
    assert curve.is_sure_of_rows and sound.at(4) < curve.at(4) < 0.02 * 2.2
    again = CostCurve.from_json(json.loads(json.dumps(curve.to_json())))
    assert again is not None and again.is_sure_of_rows


def test_loading_runs_no_pass_for_costs_and_an_answer_leaves_what_it_learnt(
    target_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    options = edgespec.GenerateOptions(max_tokens=8, ignore_eos=True)
    for is_first in (True, False):
        with edgespec.load(str(target_path), reproducible=False, threads=1) as model:
            assert model.drafters.costs.curve.is_scaled is not is_first
            model.generate("one two one two one two", options=options)
            assert model.drafters.costs.curve.is_scaled
            assert model.drafters.costs.curve.at(8) >= model.drafters.costs.curve.at(1) > 0
    for text in ("", "{", "null", "[]", "{}", "NaN", '{"plain": -1, "rows": [0.1], "seen": 1}'):
        for file in (tmp_path / "cache" / "learnt costs").iterdir():
            file.write_text(text)
        with edgespec.load(str(target_path), reproducible=False, threads=1) as model:
            assert not model.drafters.costs.curve.is_scaled, "a damaged entry is a missing one"


def test_a_heads_cost_is_a_guess_until_it_drafted_and_then_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Were it nothing until then, the first draft of every process would be as long as if it were free."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    for is_first in (True, False):
        with edgespec.load("demo", drafter="eagle", threads=1) as model:
            cost = model.drafters.costs.drafts["eagle"]
            assert cost.is_relative is is_first and cost.token_s > 0 and cost.read_s > 0
            options = edgespec.GenerateOptions(max_tokens=40, ignore_eos=True)
            for _ in range(100 * is_first):  # on a busy machine not in the first answers
                model.generate("one two one two one two", options=options)
                if cost.num_seen:
                    break
            assert not cost.is_relative and bool(cost.num_seen) is is_first

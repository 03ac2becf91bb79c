"""A first run measures nothing: it begins with a guess, and the passes of its first answer correct it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.control.auto import AutoController
from edgespec.control.base import NOTHING
from edgespec.control.constants import FIRST_ROW, START_PASSES, WIDE_ROW
from edgespec.control.cost import CostCurve
from edgespec.control.draft_cost import guessed_draft_cost
from edgespec.control.measure import cost_key, known_curve, known_draft_cost, store_curve
from edgespec.control.prior import PriorCurve, guessed_plain_s
from edgespec.drafters.ngram import NgramDrafter
from edgespec.reports import RoundRecord
from edgespec.types import Batch, Logits, Verdict
from table_engine import TableEngine


def fed(row: float, passes: int = 12, plain_s: float = 0.02) -> PriorCurve:
    """A prior that saw plain passes and then some of widths 2 to 5, each row taking `row` of a plain pass."""
    curve = PriorCurve(1.0)
    for _ in range(3):
        curve.observe(1, 0, plain_s)
    for index in range(passes):
        width = 2 + index % 4
        curve.observe(width, 0, plain_s * (1 + row * (width - 1)))
    return curve


def test_nothing_is_risked_before_plain_passes_were_timed() -> None:
    curve = PriorCurve(1.0)
    assert not curve.is_scaled and not curve.is_sure_of_plain()
    curve.observe(1, 0, 0.5)  # the first pass of a run waits for its weights
    assert not curve.is_sure_of_plain()
    curve.observe(1, 0, 0.02)
    assert curve.is_sure_of_plain()
    assert curve.at(1) == pytest.approx(0.02)
    assert curve.at(5) == pytest.approx(0.02 * (1 + 4 * FIRST_ROW))


@pytest.mark.parametrize("row", [0.05, 0.2, 0.45, 0.9])
def test_what_rows_cost_is_learnt_for_widths_that_were_not_run(row: float) -> None:
    curve = fed(row)
    assert curve.at(4) / curve.at(1) == pytest.approx(1 + 3 * row, rel=0.1)
    assert curve.at(12) / curve.at(1) == pytest.approx(1 + 11 * row, rel=0.4)
    assert curve.table(0) == sorted(curve.table(0))


def test_a_width_that_was_run_says_for_itself_what_it_costs() -> None:
    curve = fed(0.2)
    for _ in range(12):
        curve.observe(6, 0, 0.02 * 4)  # a step in the kernel
        if not curve.is_sure_of_plain():
            curve.observe(1, 0, 0.02)
    assert curve.at(6) / curve.at(1) == pytest.approx(4, rel=0.1)
    assert curve.at(4) / curve.at(1) == pytest.approx(1.6, rel=0.15)


def test_a_prompt_tells_what_rows_of_wide_passes_cost() -> None:
    """llama.cpp's Q4_K_M: a few rows are dear, and nobody would try many."""
    curve = fed(0.8)
    before = curve.table(0)
    curve.read_prompt(0.02 * 0.29)
    assert curve.table(0)[:9] == pytest.approx(before[:9])
    assert curve.at(32) / curve.at(1) == pytest.approx(1 + 31 * WIDE_ROW * 0.29, rel=0.05)
    assert curve.at(8) < curve.at(16) < curve.at(24) < curve.at(32) < 0.7 * before[32]
    curve.read_prompt(0.02 * 0.8)  # the machine was busy
    assert curve.at(32) < 0.85 * before[32]
    for _ in range(8):
        curve.observe(33, 0, 0.02 * 12)
        curve.observe(1, 0, 0.02)
    assert curve.at(33) / curve.at(1) == pytest.approx(12, rel=0.1)
    assert curve.at(4) / curve.at(1) == pytest.approx(1 + 3 * 0.8, rel=0.1), "wide passes say nothing of narrow ones"
    known = curve.table(0)
    curve.read_prompt(0.02 * 0.1)  # passes were run, which know better
    assert curve.table(0) == known
    again = PriorCurve.from_json(json.loads(json.dumps(curve.to_json())))
    assert again is not None and again.at(33) == pytest.approx(curve.at(33), rel=0.2)  # few passes count in part
    again.read_prompt(0.02 * 0.29)
    assert again.at(33) == pytest.approx(curve.at(33), rel=0.2)


def test_a_prompt_read_before_any_plain_pass_counts_once_one_was_timed() -> None:
    curve, told = PriorCurve(1.0), fed(FIRST_ROW, passes=0)
    curve.read_prompt(0.02 * 0.05)
    for _ in range(3):
        curve.observe(1, 0, 0.02)
    told.read_prompt(0.02 * 0.05)
    assert curve.table(0) == pytest.approx(told.table(0)) and curve.at(32) < 0.5 * fed(FIRST_ROW, passes=0).at(32)


def test_where_prompts_are_no_cheaper_nothing_changes() -> None:
    curve, before = fed(0.1), fed(0.1).table(0)
    curve.read_prompt(0.02 * 0.2)
    assert curve.table(0) == pytest.approx(before)


def test_rows_up_to_the_padding_are_one_pass() -> None:
    curve = PriorCurve(1.0, low=2)
    for width in (1, 2):
        curve.observe(width, 0, 0.02)
    assert curve.at(1) == curve.at(2) == pytest.approx(0.02)
    assert curve.at(3) == pytest.approx(0.02 * (1 + FIRST_ROW))


def test_what_was_learnt_goes_on_in_the_next_run() -> None:
    curve = fed(0.1)
    again = PriorCurve.from_json(json.loads(json.dumps(curve.to_json())))
    assert again is not None and again.is_scaled
    assert again.table(0) == pytest.approx(curve.table(0), rel=1e-6)
    assert not again.is_sure_of_plain()  # the machine may be another one today


@pytest.mark.parametrize(
    "damage",
    [
        *({"plain": 0}, {"plain": "x"}, {"plain": math.inf}, {"row": [1]}, {"row": [-1, 2]}, {"row": [0.1, 1e9]}),
        *({"widths": [[1, 1, 0]]}, {"widths": [[200, 1, 0]]}, {"widths": [[2, -1, 0]]}, {"widths": [[2, 1, 99]]}),
        *({"widths": 3}, {"widths": [[2, 1]]}),
    ],
)
def test_a_damaged_entry_is_a_missing_one(damage: dict[str, object]) -> None:
    assert PriorCurve.from_json(fed(0.1).to_json() | damage) is None
    for kept in (None, [], 3, {}, "text"):
        assert PriorCurve.from_json(kept) is None


def test_the_first_plain_passes_say_what_the_bank_and_the_drafts_are_worth() -> None:
    curve, cost = PriorCurve(1.0), guessed_draft_cost(0.1)
    controller = AutoController.of({"draft": NgramDrafter()}, curve, {"draft": cost}, clock=lambda: 0.0)
    controller.begin(np.arange(3, dtype=np.int32))
    assert cost.is_relative
    for position in range(3, 6):
        controller.observe(NOTHING, Verdict((), 1), RoundRecord(position, None, 0, 0, (), 0.0, 0.02))
    assert controller.bank.balance_s == pytest.approx(START_PASSES * 0.02, rel=0.05)
    assert not cost.is_relative
    assert 0 < cost.read_s < cost.token_s < 0.02


class Counting(TableEngine):
    passes = 0

    def forward(self, batch: Batch) -> Logits:
        self.passes += 1
        return super().forward(batch)


def test_a_draft_for_a_target_behind_a_network_is_guessed_in_seconds(tmp_path: Path) -> None:
    """A plain pass over RPC takes ten times as long as its arithmetic, and a drafted token does not."""
    engine, weights = TableEngine.random(10, context_length=64, max_batch=8), tmp_path / "weights.gguf"
    weights.write_bytes(b"weights")
    target = TableEngine.random(10, context_length=64, max_batch=8)
    target.facts = replace(target.facts, device="rpc 127.0.0.1:50052", weight_bytes=10**9)
    cost = known_draft_cost(engine, [weights], target)
    assert not cost.is_relative and 0 < cost.token_s < 0.1 * guessed_plain_s(10**9)


def test_a_first_run_knows_costs_without_a_pass_and_a_later_one_what_was_learnt(tmp_path: Path) -> None:
    engine, weights = Counting.random(10, context_length=64, max_batch=8), tmp_path / "weights.gguf"
    weights.write_bytes(b"weights")
    curve = known_curve(engine, [weights])
    assert isinstance(curve, PriorCurve) and known_draft_cost(engine, [weights], engine).is_relative
    assert engine.passes == 0
    store_curve(cost_key(engine, [weights]), curve)
    assert not known_curve(engine, [weights]).is_scaled
    store_curve(cost_key(engine, [weights]), fed(0.1))
    assert known_curve(engine, [weights]).table(0) == pytest.approx(fed(0.1).table(0), rel=1e-6)
    store_curve(cost_key(engine, [weights]), CostCurve({1: 1.0, 8: 2.0}))
    assert known_curve(engine, [weights]).at(8) == pytest.approx(2.0)  # measured at somebody's wish: that counts


def test_loading_runs_no_pass_for_costs_and_an_answer_leaves_what_it_learnt(
    target_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    monkeypatch.setattr("edgespec.control.measure.timed_costs", lambda *_: pytest.fail("costs were measured"))
    for is_first in (True, False):
        with edgespec.load(str(target_path), reproducible=False, threads=1) as model:
            assert model._pool.cost_curve.is_scaled is not is_first
            model.generate("one two one two one two", options=edgespec.GenerateOptions(max_tokens=8, ignore_eos=True))
            assert model._pool.cost_curve.is_scaled


def test_a_late_first_pass_is_believed_in_part_only() -> None:
    """Memory is allocated for a new width; if that passed for its cost, no draft would ever be verified again."""
    curve, sound = fed(0.1, passes=0), fed(0.1, passes=1)
    assert not curve.is_sure_of_rows
    curve.observe(2, 0, 0.02 * 4)
    assert curve.at(3) / curve.at(1) < 1 + 2 * 0.45 and not curve.is_sure_of_rows
    for late in (curve, sound):
        late.observe(3, 0, 0.02 * 1.2)
    assert curve.is_sure_of_rows and sound.at(4) < curve.at(4) < 0.02 * 2.2
    again = PriorCurve.from_json(json.loads(json.dumps(curve.to_json())))
    assert again is not None and again.is_sure_of_rows

"""Prices where several sequences share a pass: what a draft adds to the rows that are there, for the tokens of all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec import GenerateOptions
from edgespec.control import constants as c
from edgespec.control.cost import CostCurve
from edgespec.control.prices import RunCosts, best_length
from edgespec.control.threads import ThreadControl
from shared_passes import PASS_S, Costly, Ledger, rate, shared_model
from simulation import CURVES, known_curve

CURVE = {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.4, 16: 4.8, 32: 9.6, 65: 19.5}  # flat, then a row costs as much as its share


def costs() -> RunCosts:
    return RunCosts(known_curve(CURVE), {}, 1)


@pytest.mark.parametrize("prompt_rows", [0, 20])
def test_the_parts_of_all_sequences_are_the_whole_pass(prompt_rows: int) -> None:
    """Drafts pay by their rows for all that they add; what a prompt adds is nobody's."""
    found, widths = costs(), [3, 1, 6, 2]
    parts = found.parts_of(widths, prompt_rows)
    at = found.curve.at
    assert parts[1] == at(4) / 4
    assert sum(parts) == pytest.approx(at(4) + at(12 + prompt_rows) - at(4 + prompt_rows))
    assert parts[2] - parts[1] == pytest.approx(5 * (parts[3] - parts[1]))


@pytest.mark.parametrize("others", [0, 2, 6, 12])
def test_the_chosen_length_maximises_the_tokens_of_all_per_second(others: int) -> None:
    """By enumeration: (tokens of the others and of this one) over the time of the pass."""
    reach = np.cumprod([0.8] * 16)

    def rate(length: int) -> float:
        found = costs()
        return (others + 1 + reach[:length].sum()) / found.curve.at(others + 1 + length)

    best = max(range(17), key=rate)
    found = costs()
    found.share_passes(others + 1, others)
    for _ in range(200):  # the rate is learnt while it is earned
        length, _ = best_length([0.8] * 16, found.prices(), 16)
        found.earned(1 + reach[:length].sum(), found.pass_s(1 + length))  # type: ignore[arg-type]
    # The others decode plainly here, so that the running rate is this sequence's own and not quite theirs.
    assert rate(length) >= 0.93 * rate(best)


def test_shared_passes_teach_what_plain_ones_cost() -> None:
    """Where no sequence is ever alone, its first passes still turn the guess into seconds."""
    curve = CostCurve(0.5)
    found = RunCosts(curve, {}, 1)
    found.share_passes(4, 3)
    for _ in range(40):
        found.observe_shared([1] * 4, 0.02)
    assert curve.is_scaled and curve.is_sure_of_plain
    assert curve.at(4) == pytest.approx(0.02, rel=0.15)
    assert 0.004 < curve.at(1) < 0.02


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("is_kept", [False, True])
def test_where_every_pass_is_disturbed_drafting_begins_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, is_kept: bool
) -> None:
    model, clock = shared_model(tmp_path, monkeypatch, {1: 1.0, 65: 1.0}, 0.3, count)
    monkeypatch.setattr("edgespec.control.threads.Started.lacking_s", lambda started, threads: 9.0)
    with model:
        model.drafters.threads = ThreadControl([1], lambda threads: None, clock)
        if is_kept:
            curve = CostCurve.from_json({"plain": PASS_S, "rows": [0.0] * 66, "passes": [9.0] * 66, "seen": 50})
            assert curve is not None
            model.drafters.costs.curve = curve
        _, stats = rate(model, clock, count, GenerateOptions(max_tokens=40), 2 * count)
    assert sum(each.accepted_tokens for each in stats) > 10 * count


def test_beside_many_rows_a_few_of_its_own_remain() -> None:
    found = costs()
    found.share_passes(2, 500)
    assert found.most_rows == 9 and np.isfinite(found.prices().pass_s[9])


def test_a_step_that_all_drafts_climb_together_is_paid_by_all() -> None:
    """Rows 5 to 8 of a pass cost what the fifth does: beside three that draft, a draft is not free."""
    found = RunCosts(known_curve({1: 1.0, 4: 1.7, 5: 2.7, 8: 2.8, 65: 60.0}), {}, 1)
    found.share_passes(4, 3)
    alone_s = found.pass_s(2) - found.plain_s()
    found.share_passes(4, 6)  # three others draft a token each
    beside_s = found.pass_s(2) - found.plain_s()
    assert alone_s == pytest.approx(1.0)
    assert beside_s == pytest.approx(1.1 / 4)
    found.share_passes(4, 6, prompt_rows=3)  # what others have there is a prompt, which nobody drafts
    assert found.pass_s(2) - found.plain_s() == pytest.approx(found.curve.at(8) - found.curve.at(7))


def test_where_uneven_rows_are_passes_of_their_own_a_draft_pays_for_a_whole_one() -> None:
    curve = known_curve({1: 1.0, 2: 1.1, 4: 1.4, 8: 2.0, 65: 12.0})
    found = RunCosts(curve, {}, 1)
    found.share_passes(4, 3)
    packed_s = found.pass_s(5) - found.plain_s()
    found = RunCosts(curve, {}, 1, splits=True)
    found.share_passes(4, 3)
    assert found.pass_s(5) - found.plain_s() == pytest.approx(curve.at(4)) and curve.at(4) > 2 * packed_s
    parts = found.parts_of([5, 1, 1, 1], 0)
    assert sum(parts) == pytest.approx(2 * curve.at(4)) and parts[0] == pytest.approx(1.25 * curve.at(4))
    for _ in range(40):  # the second pass, of two rows, takes longer than was known
        found.observe_shared([3, 1, 1, 1], 1.4 + 1.65)
    assert 1.3 < curve.at(2) < 1.7 and curve.at(6) < 2.2
    found.share_passes(1, 0)  # alone, a draft shares the pass of its own sequence
    assert found.pass_s(3) < 2 * curve.at(1)


def test_the_pace_of_all_widths_follows_plain_passes_of_several_sequences() -> None:
    """A growing context slows all passes down, and no pass of one row tells: a draft must not look free for that."""
    found = costs()
    found.curve.observe(1, 1.0)
    found.share_passes(4, 3)
    for _ in range(40):
        found.observe_shared([5, 1, 1, 1], 2.4)
    for step in range(60):
        found.observe_shared([1] * 4, 1.3 * (1 + step / 60))
    assert found.curve.at(4) == pytest.approx(2.6, rel=0.1)
    assert found.curve.at(8) - found.curve.at(4) > 1.2


def test_the_time_of_shared_passes_is_charged_once_to_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What four answers are told that their drafts and passes took is what went by, on a curve with a step."""
    ratios = {1: 1.0, 4: 1.1, 8: 1.15, 9: 1.5, 16: 1.6, 64: 5.0}
    model, clock = shared_model(tmp_path, monkeypatch, ratios, 0.3, 4)
    with model:
        target = model.target
        assert isinstance(target, Costly)
        options = GenerateOptions(max_tokens=150, logprobs=False)
        rate(model, clock, 1, options, 4, lengths=(20,))  # what rows cost is learnt
        started_s, first = clock(), len(target.widths)
        _, stats = rate(model, clock, 4, options, 4, lengths=(20,))
        told_s = sum(each.draft_s + each.verify_s for each in stats)
        assert target.widths[first] == 80 and sum(each.accepted_tokens for each in stats) > 60
        assert told_s == pytest.approx(clock() - started_s - target.seconds(80), rel=0.005)


@pytest.mark.parametrize("sigma", [1.0, 3.0])
@pytest.mark.parametrize("curve", ["onnx int8", "llamacpp q8_0"])
def test_never_slower_however_many_answers_share_passes(
    curve: str, sigma: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a draft that is right half of the time, and one that is right by chance; at every moment, for each load.

    Besides the share that may be lost there is what the bank begins with, however many answers run and whatever was
    gained with fewer of them.
    """
    model, clock = shared_model(tmp_path, monkeypatch, CURVES[curve], sigma, 8)
    options = GenerateOptions(max_tokens=80, logprobs=False)
    with model:
        assert isinstance(model.target, Costly)
        ledger = Ledger(model.target, 0.02)
        for count in (1, 8, 4):
            rate(model, clock, count, options, count + 4, ledger=ledger)
    assert {1, 4, 8} <= set(ledger.worst_s)
    assert max(ledger.worst_s.values()) <= max(c.START_PASSES * PASS_S, c.START_S)

"""Expected speedups and what would have to change, by hand on made-up costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.bench.report import Side
from edgespec.bench.runner import Measurement
from edgespec.bench.sweep import Costs, balance, changes, expected_speedup, threshold
from edgespec.reports import Stats

ROUND_S = [0.0, 0.1, *(0.12 + 0.02 * extra for extra in range(15))]
COSTS = Costs(0.1, ROUND_S, 0.01, acceptance=0.8)


def test_with_flat_costs_it_is_leviathans_formula() -> None:
    for length in (1, 4, 8):
        by_hand = (1 - 0.8 ** (length + 1)) / (0.2 * (1 + length * 0.1))
        assert replace(COSTS, round_s=[0.1] * 17).expected(length) == pytest.approx(by_hand)
        assert COSTS.expected(length) == pytest.approx(expected_speedup(0.8, length, ROUND_S, 0.01))
        assert 1 < replace(COSTS, drafting=0.5).expected(length) < COSTS.expected(length)


def test_drafting_pays_from_where_it_says() -> None:
    share = COSTS.pays_from
    assert share is not None and 0 < share < 0.8
    for rate, gains in ((share, True), (share - 1e-3, False)):
        assert (replace(COSTS, acceptance=rate).best()[0] > 1) == gains
    dear = replace(COSTS, round_s=[0.1 * width for width in range(17)])
    assert dear.pays_from is None and "would not pay off even if" in threshold(dear)
    assert f"drafting pays off above {share:.0%} acceptance" in threshold(COSTS)
    assert "a pass over 4 tokens costs 1.60 plain ones, a drafted token 0.10" in threshold(COSTS)


def test_each_change_alone_reaches_the_goal() -> None:
    speedup, _ = COSTS.best()
    said = changes(COSTS)
    assert said.startswith(f"expected speedup {speedup:.2f}x at a draft length of ")
    goal = float(said.partition("; ")[2].partition("x")[0])
    wanted = float(said.partition("an acceptance of ")[2].partition("%")[0]) / 100
    assert speedup < goal <= replace(COSTS, acceptance=wanted + 0.005).best()[0]
    assert "plain decoding" in changes(replace(COSTS, acceptance=0.05))


def test_the_balance_is_exact() -> None:
    """13 tokens: plainly 0.1 s each; with speculation three rounds of 4 tokens, each of 0.2 s."""
    plain = Side([Measurement(Stats(new_tokens=13, prefill_s=1.0, wall_s=2.2, rounds=12))])
    counts = {"rounds": 3, "drafted_tokens": 9, "accepted_tokens": 9}
    times = {"prefill_s": 1.0, "wall_s": 1.6, "verify_s": 0.45, "draft_s": 0.09}
    drafted = Side([Measurement(Stats(new_tokens=13, **counts, **times))])
    assert balance(plain, drafted) == (
        "faster: a round emitted 4.00 tokens (100% of 9 draft tokens accepted) in the time of 2.00 plain tokens: "
        "target pass 1.50, drafting 0.30, other 0.20"
    )

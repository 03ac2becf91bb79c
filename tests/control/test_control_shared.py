"""Prices where several sequences share a pass: what a draft adds to the rows that are there, for the tokens of all."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.control.cost import CostCurve, PriorCurve
from edgespec.control.length import best_length
from edgespec.control.run_cost import RunCosts

CURVE = {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.4, 16: 4.8, 32: 9.6, 65: 19.5}  # flat, then a row costs as much as its share


def costs() -> RunCosts:
    return RunCosts(CostCurve(CURVE), {}, 1)


def test_alone_prices_are_those_of_the_curve() -> None:
    found = costs()
    before = found.prices(0)
    found.share_passes(3, 7)
    assert found.prices(0) != before
    found.share_passes(1, 0)
    assert found.prices(0) == before


def test_the_parts_of_all_sequences_are_the_whole_pass() -> None:
    """Each is told what it adds to the rows before it and to the plain rows behind it."""
    found, widths = costs(), [3, 1, 6, 2]
    parts = [
        found.part_of(len(widths), sum(widths[:place]) + len(widths) - place - 1, width, 0)
        for place, width in enumerate(widths)
    ]
    assert sum(parts) == pytest.approx(found.curve.at(sum(widths)))


def test_drafts_are_shorter_the_more_sequences_run() -> None:
    """A draft that fills a cheap pass alone would be paid for in full beside many rows."""
    confidences = [0.7] * 8
    lengths = []
    for others in (0, 1, 3, 7, 15):
        found = costs()
        found.share_passes(others + 1, others)
        lengths.append(best_length(confidences, found.prices(0), 8)[0])
    assert lengths[0] >= 3 and lengths[-1] == 0 and lengths == sorted(lengths, reverse=True)


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
        length, _ = best_length([0.8] * 16, found.prices(0), 16)
        found.earned(1 + reach[:length].sum(), found.pass_s(1 + length, 0))  # type: ignore[arg-type]
    # The others decode plainly here, so that the running rate is this sequence's own and not quite theirs.
    assert rate(length) >= 0.93 * rate(best)


def test_shared_passes_teach_what_plain_ones_cost() -> None:
    """Where no sequence is ever alone, its first passes still turn the guess into seconds."""
    curve = PriorCurve(0.5)
    found = RunCosts(curve, {}, 1)
    found.share_passes(4, 3)
    for _ in range(40):
        found.observe_shared(4, 0, 0.02)
    assert curve.is_scaled and curve.is_sure_of_plain()
    assert curve.at(4) == pytest.approx(0.02, rel=0.15)
    assert 0.004 < curve.at(1) < 0.02


def test_beside_many_rows_a_few_of_its_own_remain() -> None:
    found = costs()
    found.share_passes(2, 500)
    assert found.most_rows == 9 and np.isfinite(found.prices(0).pass_s[9])

"""What passes and drafts are taken to cost before any was timed, and how the passes of a first answer correct it.

Nothing is measured before the first token. A first run begins with a straight line: a pass of one row costs what the
first plain passes show, and each further row a part of that which is dear for most kernels. Every pass over a draft
says what a row costs here, for all widths that were not run yet; a width that was run says it for itself. What a wrong
line can lose is what the time bank lends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from edgespec.control.cost import WIDEST, CostCurve, DraftCost

ROW = 0.45  # of a plain pass, that each further row is taken to cost; measured were 0.05 (tiny models) to 0.9
_ROW_WEIGHT = 0.75  # passes that this guess is worth
_MOST_ROW = 2.0  # of a plain pass, that one pass may say of a row
_MOST_PASSES = 24.0  # that are remembered of what a row costs
_LEAST_CHANGE = 0.02  # of a row, below which the line stays
_PLAIN_PASSES = 2  # of which the faster one is believed: the first pass of a run often waits for its weights
_GUESSED_BYTES_PER_S, _GUESSED_PASS_S = 1e10, 2e-4  # only what time is counted in until the first plain passes
DRAFT_SHARE, READ_SHARE = 1.5, 0.3  # of the bytes' share in time; of a drafted token, that a read one takes


class PriorCurve(CostCurve):
    """A cost curve of which nothing was measured ahead.

    `guess_s`: seconds of a plain pass, believed until two were timed; `low`: rows that a lone token is padded to.
    """

    def __init__(self, guess_s: float, low: int = 1) -> None:
        self._low, self._row, self._row_weight = low, ROW, _ROW_WEIGHT
        super().__init__({width: guess_s * self._line(width) for width in range(1, WIDEST + 1)})
        self._plain: list[float] = []
        self._is_scaled = False

    @property
    def is_scaled(self) -> bool:
        return self._is_scaled

    def is_sure_of_plain(self) -> bool:
        return self._is_scaled and super().is_sure_of_plain()

    def observe(self, width: int, context_tokens: int, seconds: float) -> None:
        if not self._is_scaled:
            if width <= self._low and seconds > 0:
                self._plain.append(seconds)
            if len(self._plain) < _PLAIN_PASSES:
                return
            self._rebase(min(self._plain))
            self._is_scaled, width, seconds = True, 1, min(self._plain)
        if self._low < width <= WIDEST and seconds > 0:
            self._learn_row(width, seconds)  # first: what all widths share is not this one's own
        super().observe(width, context_tokens, seconds)

    def _line(self, width: int) -> float:
        return 1.0 + self._row * max(width - self._low, 0)

    def _learn_row(self, width: int, seconds: float) -> None:
        """A pass says what a row costs; the line follows where that is news to it."""
        plain_s = self._base[1] * math.exp(self._drift)
        seen = min(max((seconds / plain_s - 1.0) / (width - self._low), 0.0), _MOST_ROW)
        self._row_weight = min(self._row_weight + 1.0, _MOST_PASSES)
        row = self._row + (seen - self._row) / self._row_weight
        if abs(row - self._row) * (width - 1) > _LEAST_CHANGE:
            self._row = row
            self._rebase(self._base[1])

    def _rebase(self, plain_s: float) -> None:
        """Draw the line anew; widths that were run keep what they showed."""
        before = self._base_s
        self._base = [0.0, *(plain_s * self._line(width) for width in range(1, WIDEST + 1))]
        self._base_s = np.array(self._base)
        self.measured = {width: self._base[width] for width in self.measured}
        self._own[1:] -= np.where(self._passes[1:] > 0, np.log(self._base_s[1:] / before[1:]), 0.0)
        self._judge()
        self._table_step = -1

    def kept(self) -> dict[str, Any]:
        """What was learnt, for the next run, as JSON; empty while no plain pass was timed."""
        if not self._is_scaled:
            return {}
        widths = np.flatnonzero(self._passes)
        return {
            "plain": self._base[1] * math.exp(self._drift),
            "row": [self._row, self._row_weight],
            "widths": [[int(width), float(self._passes[width]), float(self._own[width])] for width in widths],
        }

    @classmethod
    def of(cls, kept: object, low: int = 1) -> Self | None:
        """The curve that `kept` gave; None for anything else."""
        try:
            assert isinstance(kept, Mapping)
            plain_s, (row, weight) = float(kept["plain"]), map(float, kept["row"])
            widths = [(int(width), float(passes), float(own)) for width, passes, own in kept["widths"]]
        except (AssertionError, KeyError, TypeError, ValueError):
            return None
        sound = 0 < plain_s < math.inf and 0 <= row <= _MOST_ROW and _ROW_WEIGHT <= weight <= _MOST_PASSES
        if not sound or not all(1 < w <= WIDEST and 0 < n < math.inf and abs(own) < 20 for w, n, own in widths):
            return None
        curve = cls(plain_s, low)
        curve._row, curve._row_weight = row, weight
        curve._rebase(plain_s)
        curve._is_scaled = True
        for width, passes, own in widths:
            curve._passes[width], curve._own[width] = passes, own
        curve._judge()
        return curve


def guessed_plain_s(weight_bytes: int) -> float:
    """Seconds of a plain pass over so many bytes, to count time in until one was timed."""
    return _GUESSED_PASS_S + weight_bytes / _GUESSED_BYTES_PER_S


def guessed_draft_cost(share: float) -> DraftCost:
    """Of a draft with `share` of its target's weights, in plain passes of the target until `DraftCost.scale`."""
    token = min(0.02 + DRAFT_SHARE * share, 1.0)
    return DraftCost(token, READ_SHARE * token, is_relative=True)

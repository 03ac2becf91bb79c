"""What the target's passes cost before anything was measured: a guess that the first answer's passes put right.

Nothing is measured before the first token. A first run begins with a straight line: a pass of one row costs what the
first plain passes take, and each additional row a share of that, which is too low for many kernels. Two passes put that
right, and the time bank limits what they can lose; a share that is too high would be believed for ever, since nothing
would be verified. For the same reason one late pass may raise the line by little: the first of a width often is late.

Many kernels cost far less per row in wide passes than in narrow ones, which is how prompts are read. So the time of a
prompt tells what a long draft costs, and without it nobody would find out: where a few rows are dear, nothing longer is
tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.control import constants as c
from edgespec.control.cost import ROWS, WIDEST, CostCurve

# [WIDEST + 1]: how much a width is like that of a prompt's passes, by its octaves.
_WIDENESS = np.clip(np.log2(np.maximum(ROWS, 1) / c.NARROW) / math.log2(c.WIDE / c.NARROW), 0.0, 1.0)


class PriorCurve(CostCurve):
    """A cost curve without a measurement.

    `guess_s`: seconds of a plain pass until two were timed; `low`: rows that a single token is padded to.
    """

    def __init__(self, guess_s: float, low: int = 1) -> None:
        self._low, self._row, self._row_weight = low, c.FIRST_ROW, c.ROW_WEIGHT
        self._read_s: float | None = None  # seconds of a prompt's token, until a plain pass was timed
        self._wide_row: float | None = None  # a row of a wide pass, in plain passes
        self._has_run_wide = False  # passes say what prompts only suggest
        super().__init__(dict(enumerate((guess_s * self._line())[1:].tolist(), 1)))
        self._plain: list[float] = []
        self._is_scaled = False

    @property
    def is_scaled(self) -> bool:
        return self._is_scaled

    @property
    def is_sure_of_rows(self) -> bool:
        return self._row_weight >= c.ROW_WEIGHT + c.ROW_PASSES

    def is_sure_of_plain(self) -> bool:
        return self._is_scaled and super().is_sure_of_plain()

    def observe(self, width: int, context_tokens: int, seconds: float, *, is_plain: bool = False) -> None:
        if not self._is_scaled:
            if width <= self._low and seconds > 0:
                self._plain.append(seconds)
            if len(self._plain) < c.PLAIN_PASSES:
                return
            self._rebase(min(self._plain))
            self._is_scaled, width, seconds = True, 1, min(self._plain)
            if self._read_s is not None:
                self.read_prompt(self._read_s)
        if self._low < width <= WIDEST and seconds > 0:
            self._learn_row(width, seconds)  # first, so that only the rest counts as this width's own
        super().observe(width, context_tokens, seconds, is_plain=is_plain)

    def read_prompt(self, token_s: float) -> None:
        if not self._is_scaled:
            self._read_s = token_s
            return
        if self._has_run_wide:
            return
        seen, before = c.WIDE_ROW * token_s / (self._base[1] * math.exp(self._drift)), self._wide_row
        # Prompts are late when weights are read from a disk or others compute, and never early.
        self._wide_row = seen if before is None or seen < before else before + c.PROMPT_RATE * (seen - before)
        self._rebase(self._base[1])

    def _line(self) -> NDArray[np.float64]:
        """[WIDEST + 1]: passes by width, in plain ones; rows of wide passes cost what those of prompts do."""
        row = self._row + (min(self._wide_row or self._row, self._row) - self._row) * _WIDENESS
        line: NDArray[np.float64] = np.maximum.accumulate(self._straight(row))
        return line

    def _straight(self, row: float | NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = 1.0 + row * np.maximum(ROWS - self._low, 0)
        return found

    def _learn_row(self, width: int, seconds: float) -> None:
        """Learn the cost of a row from a pass; the line is redrawn when that has changed enough."""
        plain_s, wideness = self._base[1] * math.exp(self._drift), float(_WIDENESS[width])
        seen, wide_row = (seconds / plain_s - 1.0) / (width - self._low), self._wide_row
        if wide_row is not None and wide_row < self._row:
            if wideness > 0.5:
                seen = min(max((seen - (1.0 - wideness) * self._row) / wideness, 0.0), self._row)
                self._wide_row, self._has_run_wide = wide_row + c.WIDE_RATE * (seen - wide_row), True
                self._rebase(self._base[1])
                return
            seen = (seen - wideness * wide_row) / (1.0 - wideness)
        seen = min(max(seen, 0.0), c.MOST_ROW, c.ROW_FACTOR * self._row + c.ROW_STEP)
        self._row_weight = min(self._row_weight + 1.0, c.MOST_ROW_PASSES)
        row = self._row + (seen - self._row) / self._row_weight
        if abs(row - self._row) * (width - 1) > c.LEAST_ROW_CHANGE:
            self._row = row
            self._rebase(self._base[1])

    def _rebase(self, plain_s: float) -> None:
        """Redraw the line; widths that were run keep their times."""
        before = self._base_s
        self._base_s = plain_s * self._line()
        self._base_s[0] = 0.0
        self._base = self._base_s.tolist()
        self.measured = {width: self._base[width] for width in self.measured}
        self._own[1:] -= np.where(self._passes[1:] > 0, np.log(self._base_s[1:] / before[1:]), 0.0)
        self._smooth()
        self._table_step = -1

    def to_json(self) -> dict[str, Any]:
        """What was learnt, for the next run; empty while no plain pass was timed."""
        if not self._is_scaled:
            return {}
        widths = np.flatnonzero(self._passes)
        own = self._own + np.log(self._line() / self._straight(self._row))  # the next run has read no prompt yet
        return {
            "plain": self._base[1] * math.exp(self._drift),
            "row": [self._row, self._row_weight],
            "widths": [[int(width), float(self._passes[width]), float(own[width])] for width in widths],
        }

    @classmethod
    def from_json(cls, kept: object, low: int = 1) -> Self | None:
        """The curve that `to_json` returned; None for anything else."""
        try:
            assert isinstance(kept, Mapping)
            plain_s, (row, weight) = float(kept["plain"]), map(float, kept["row"])
            widths = [(int(width), float(passes), float(own)) for width, passes, own in kept["widths"]]
        except (AssertionError, KeyError, TypeError, ValueError):
            return None
        sound = 0 < plain_s < math.inf and 0 <= row <= c.MOST_ROW and c.ROW_WEIGHT <= weight <= c.MOST_ROW_PASSES
        if not sound or not all(1 < w <= WIDEST and 0 < n < math.inf and abs(own) < 20 for w, n, own in widths):
            return None
        curve = cls(plain_s, low)
        curve._row, curve._row_weight = row, weight
        curve._rebase(plain_s)
        curve._is_scaled = True
        for width, passes, own in widths:
            curve._passes[width], curve._own[width] = passes, own
        curve._smooth()
        return curve


def guessed_plain_s(weight_bytes: int) -> float:
    """Seconds of a plain pass over so many bytes, as a unit of time until one was timed."""
    return c.GUESSED_PASS_S + weight_bytes / c.GUESSED_BYTES_PER_S

"""What the target's passes cost, by rows and context: measured before or guessed, and corrected by every pass.

On a CPU a pass over several tokens costs more than one over a single token, in steps that differ from kernel to
kernel, so the only assumption about the curve is that it does not fall: a narrow pass can always be padded to a wider
one. Machines are noisy and heat up, so each observation moves the curve a little, an outlier no more than others.

Nothing is measured before the first token. A first run begins with a straight line (`PriorCurve`): a pass of one row
costs what the first plain passes take, and each additional row a share of that, which is too high for most kernels. The
time bank limits what a wrong line can lose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.control import constants as c

WIDEST = 65
_WIDTHS = np.arange(WIDEST + 1)


@dataclass(frozen=True, slots=True)
class ContextCost:
    """Seconds that each cached token adds to a pass: `fixed_s` whatever its width, `row_s` for every row."""

    fixed_s: float = 0.0
    row_s: float = 0.0

    def at(self, width: int, context_tokens: int) -> float:
        return context_tokens * (self.fixed_s + width * self.row_s)


def _likenesses() -> NDArray[np.float64]:
    """[WIDEST + 1, WIDEST + 1]: how much a pass of one width says about another one; 0 on the diagonal.

    0 to and from plain passes (row and column 1): all others are measured against them.
    """
    octaves = np.log2(np.maximum(_WIDTHS, 1))
    found: NDArray[np.float64] = np.exp(-np.abs(octaves[:, None] - octaves[None, :]) / c.LIKENESS)
    np.fill_diagonal(found, 0.0)
    found[:, :2] = found[:2, :] = 0.0
    return found


_LIKENESSES = _likenesses()


class CostCurve:
    """t(width, context) in seconds, from passes measured at a few widths on an almost empty cache."""

    def __init__(self, measured: Mapping[int, float], context: ContextCost = ContextCost()) -> None:
        if not measured or min(measured) < 1 or min(measured.values()) <= 0:
            raise ValueError(f"a cost curve needs positive times of positive widths, got {dict(measured)}")
        self.measured = never_falling(measured)
        self.context = context
        self._base = _interpolated(self.measured)
        self._base_s = np.array(self._base)
        self._passes = np.zeros(WIDEST + 1)  # of each width
        self._own = np.zeros(WIDEST + 1)  # mean logarithm over the base that they took, drift aside
        self._local = np.zeros(WIDEST + 1)  # the same, smoothed over similar widths
        self._first: list[float] = []  # logarithms of the first plain passes over the base
        self._odd: dict[int, list[float]] = {}  # recent large deviations of each width
        self._drift = 0.0
        self._stale = 0.0  # how much has been learnt since the table was made, in logarithms
        self._table: list[float] = []
        self._table_step = -1

    def table(self, context_tokens: int) -> list[float]:
        """Seconds of a pass of width 0 (nothing) to WIDEST, never falling, with `context_tokens` in the cache."""
        step = context_tokens // c.CONTEXT_STEP
        if step != self._table_step:
            self._table_step = step
            self._stale = 0.0
            self._table = self._rebuilt(step * c.CONTEXT_STEP)
        return self._table

    def at(self, width: int, context_tokens: int = 0) -> float:
        """Seconds of one pass."""
        return self.table(context_tokens)[width]

    def observe(self, width: int, context_tokens: int, seconds: float, *, is_plain: bool = False) -> None:
        """Learn from a pass that took `seconds`. `is_plain`: it is the plain pass of as many sequences."""
        if not 1 <= width <= WIDEST or seconds <= 0:
            return
        ratio = math.log(seconds / (self._base[width] + self.context.at(width, context_tokens)))
        if width > 1 or len(self._first) == c.FIRST_PASSES:
            self._follow(width, ratio, c.PLAIN_RATE if is_plain or width == 1 else c.DRIFT_RATE)
        else:
            self._first.append(ratio)
            self._drift = median(self._first)  # an earlier measurement may be from a busier machine
            if len(self._first) < c.FIRST_PASSES:
                self._drift = min(self._drift, c.FIRST_LATENESS)
            self._table_step = -1
        if self._stale > c.MOST_STALE:
            self._table_step = -1

    @property
    def is_scaled(self) -> bool:
        """Whether its times are in seconds of this machine, and not a guess."""
        return True

    def is_sure_of_plain(self) -> bool:
        """Whether plain passes were timed in this run, and the last one was not much faster than expected.

        A slower one does no harm: if plain passes are underestimated, drafts look worse than they are.
        """
        if len(self._first) < c.FIRST_PASSES:
            return bool(self._first) and self._first[-1] > -c.FIRST_LATENESS
        odd = self._odd.get(1)
        return not (odd and odd[0] < 0)

    def _follow(self, width: int, ratio: float, rate: float) -> None:
        """Move a little towards one pass; after three large deviations in one direction, all the way."""
        surprise = ratio - self._drift - float(self._local[width])
        odd = self._odd.setdefault(width, [])
        if abs(surprise) <= c.MOST_SURPRISE or (odd and (odd[0] > 0) != (surprise > 0)):
            odd.clear()
        if abs(surprise) > c.MOST_SURPRISE:
            odd.append(surprise)
        if len(odd) < c.FIRST_PASSES:
            self._move(width, max(-c.MOST_SURPRISE, min(c.MOST_SURPRISE, surprise)), rate)
        else:
            self._jump(width, median(odd))
            odd.clear()

    def _move(self, width: int, surprise: float, rate: float) -> None:
        """All widths are relative to plain passes, so a plain pass changes mostly the machine's pace, by `rate`."""
        self._drift += rate * surprise
        self._stale += abs(surprise) * c.PLAIN_RATE
        if width > 1:
            seen = self._local[width] + surprise
            self._passes[width] = passes = min(self._passes[width] + 1.0, c.MOST_OWN_PASSES)
            self._own[width] += (seen - self._own[width]) / passes
            self._judge()

    def _jump(self, width: int, surprise: float) -> None:
        self._stale += abs(surprise)
        if width == 1:
            self._drift += surprise
        else:
            self._own[width] = self._local[width] + surprise
            self._judge()

    def _judge(self) -> None:
        """What each width costs beyond the base, from its own passes and, while these are few, from similar widths.

        Drafts have many lengths, so each width is seen rarely. Without smoothing the largest of several noisy times
        would make all wider passes look as expensive, since the curve never falls, and drafts would be too long.
        """
        others = _LIKENESSES @ self._passes
        of_others = _LIKENESSES @ (self._passes * self._own) / (others + c.FORMER_PASSES)
        self._local = (self._passes * self._own + c.FORMER_PASSES * of_others) / (self._passes + c.FORMER_PASSES)

    def refined(self) -> dict[int, float]:
        """The current estimates by measured width, for the next run; drift is not kept."""
        return {width: self._base[width] * math.exp(self._local[width]) for width in self.measured}

    def _rebuilt(self, context_tokens: int) -> list[float]:
        context, scale = self.context, math.exp(self._drift)
        times = np.exp(self._local) * (self._base_s + context_tokens * (context.fixed_s + _WIDTHS * context.row_s))
        times[0] = 0.0
        # A width that was never run costs no less than the narrower ones that were.
        is_seen = self._passes > 0
        is_seen[1] = True
        np.maximum(times, np.maximum.accumulate(np.where(is_seen, times, 0.0)), out=times, where=~is_seen)
        # Made non-decreasing: midway between the lowest such curve above the times and the highest one below.
        above, below = np.maximum.accumulate(times), np.minimum.accumulate(times[::-1])[::-1]
        found: list[float] = (0.5 * scale * (above + below)).tolist()
        return found


def never_falling(measured: Mapping[int, float]) -> dict[int, float]:
    """The nearest non-decreasing curve, by pooling adjacent violators (Ayer et al. 1955) with equal weights.

    One fast time of a wide pass would otherwise make every narrower one look as cheap.
    """
    pools: list[tuple[float, list[int]]] = []
    for width, seconds in sorted(measured.items()):
        mean, widths = seconds, [width]
        while pools and pools[-1][0] > mean:
            below, members = pools.pop()
            mean = (below * len(members) + mean * len(widths)) / (len(members) + len(widths))
            widths = members + widths
        pools.append((mean, widths))
    return {width: mean for mean, widths in pools for width in widths}


def _interpolated(measured: Mapping[int, float]) -> list[float]:
    """Seconds by width 0..WIDEST: straight lines between measured widths, the last slope beyond them."""
    widths = list(measured)
    times = [0.0] * (WIDEST + 1)
    for width in range(1, WIDEST + 1):
        above = next((index for index, known in enumerate(widths) if known >= width), len(widths) - 1)
        high = widths[above]
        low = widths[max(above - 1, 0)]
        if high == low:
            times[width] = measured[high] * (max(width, high) / high)
            continue
        slope = (measured[high] - measured[low]) / (high - low)
        times[width] = max(measured[low] + slope * (width - low), min(measured.values()))
    return times


class PriorCurve(CostCurve):
    """A cost curve without a measurement.

    `guess_s`: seconds of a plain pass until two were timed; `low`: rows that a single token is padded to.
    """

    def __init__(self, guess_s: float, low: int = 1) -> None:
        self._low, self._row, self._row_weight = low, c.FIRST_ROW, c.ROW_WEIGHT
        super().__init__({width: guess_s * self._line(width) for width in range(1, WIDEST + 1)})
        self._plain: list[float] = []
        self._is_scaled = False

    @property
    def is_scaled(self) -> bool:
        return self._is_scaled

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
        if self._low < width <= WIDEST and seconds > 0:
            self._learn_row(width, seconds)  # first, so that only the rest counts as this width's own
        super().observe(width, context_tokens, seconds, is_plain=is_plain)

    def _line(self, width: int) -> float:
        return 1.0 + self._row * max(width - self._low, 0)

    def _learn_row(self, width: int, seconds: float) -> None:
        """Learn the cost of a row from a pass; the line is redrawn when that has changed enough."""
        plain_s = self._base[1] * math.exp(self._drift)
        seen = min(max((seconds / plain_s - 1.0) / (width - self._low), 0.0), c.MOST_ROW)
        self._row_weight = min(self._row_weight + 1.0, c.MOST_ROW_PASSES)
        row = self._row + (seen - self._row) / self._row_weight
        if abs(row - self._row) * (width - 1) > c.LEAST_ROW_CHANGE:
            self._row = row
            self._rebase(self._base[1])

    def _rebase(self, plain_s: float) -> None:
        """Redraw the line; widths that were run keep their times."""
        before = self._base_s
        self._base_s = plain_s * (1.0 + self._row * np.maximum(_WIDTHS - self._low, 0))
        self._base_s[0] = 0.0
        self._base = self._base_s.tolist()
        self.measured = {width: self._base[width] for width in self.measured}
        self._own[1:] -= np.where(self._passes[1:] > 0, np.log(self._base_s[1:] / before[1:]), 0.0)
        self._judge()
        self._table_step = -1

    def kept(self) -> dict[str, Any]:
        """For the next run, as JSON; empty while no plain pass was timed."""
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
        """The curve that `kept` returned; None for anything else."""
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
        curve._judge()
        return curve


def guessed_plain_s(weight_bytes: int) -> float:
    """Seconds of a plain pass over so many bytes, as a unit of time until one was timed."""
    return c.GUESSED_PASS_S + weight_bytes / c.GUESSED_BYTES_PER_S

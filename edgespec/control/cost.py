"""What the target's passes cost, by rows and context: measured before, and corrected by every pass.

On a CPU a pass over several tokens costs more than one over a single token, in steps that differ from kernel to
kernel, so the only assumption about the curve is that it does not fall: a narrow pass can always be padded to a wider
one. Machines are noisy and heat up, so each observation moves the curve a little, an outlier no more than others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from edgespec.control import constants as c

WIDEST = 65
ROWS = np.arange(WIDEST + 1)  # of a pass: every width that has a price


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
    octaves = np.log2(np.maximum(ROWS, 1))
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
        self._doubted: set[int] = set()  # widths that were late again and again; a plain pass tells why
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
        is_plain = is_plain or width == 1
        if is_plain and self._doubted:
            self._resolve(max(ratio - self._drift - float(self._local[width]), 0.0))
        if width > 1 or len(self._first) == c.FIRST_PASSES:
            self._follow(width, ratio, is_plain=is_plain)
        else:
            self._first.append(ratio)
            self._drift = median(self._first)  # an earlier measurement may be from a busier machine
            if len(self._first) < c.FIRST_PASSES:
                self._drift = min(self._drift, c.FIRST_LATENESS)
            self._table_step = -1
        if self._stale > c.MOST_STALE:
            self._table_step = -1

    def read_prompt(self, token_s: float) -> None:
        """A prompt was read in wide passes, `token_s` seconds a token; those of a measured curve are known."""

    @property
    def is_scaled(self) -> bool:
        """Whether its times are in seconds of this machine, and not a guess."""
        return True

    @property
    def is_sure_of_rows(self) -> bool:
        """Whether what a row costs is more than a guess."""
        return True

    def is_sure_of_plain(self) -> bool:
        """Whether plain passes were timed in this run, and the last one was not much faster than expected.

        A slower one does no harm: if plain passes are underestimated, drafts look worse than they are. False,
        too, where a width was late so often that its cost has changed or the whole machine is slow: a plain pass tells.
        """
        if self._doubted:
            return False
        if len(self._first) < c.FIRST_PASSES:
            return bool(self._first) and self._first[-1] > -c.FIRST_LATENESS
        odd = self._odd.get(1)
        return not (odd and odd[0] < 0)

    def _follow(self, width: int, ratio: float, *, is_plain: bool) -> None:
        """Move a little towards one pass; after three large deviations in one direction, all the way.

        Where wide passes are late, a plain pass tells first how much of that is the machine's: in a moment of slowness
        short drafts would look dear, would not be drafted any more, and nothing would ever put that right.
        """
        surprise = ratio - self._drift - float(self._local[width])
        odd = self._odd.setdefault(width, [])
        if abs(surprise) <= c.MOST_SURPRISE or (odd and (odd[0] > 0) != (surprise > 0)):
            self._believed(width)
        if abs(surprise) > c.MOST_SURPRISE:
            odd.append(surprise)
        if len(odd) < c.FIRST_PASSES:
            self._move(width, max(-c.MOST_SURPRISE, min(c.MOST_SURPRISE, surprise)), is_plain=is_plain)
        elif is_plain or surprise < 0 or len(odd) > c.UNTOLD_PASSES:
            self._jump(width, median(odd))
            self._believed(width)
        else:
            self._doubted.add(width)

    def _resolve(self, late: float) -> None:
        """A plain pass took `late` more than usual, in logarithms; what the doubted widths took more is theirs."""
        for width in list(self._doubted):
            own = median(self._odd[width]) - late
            if own > c.MOST_SURPRISE:
                self._jump(width, own)
            self._believed(width)

    def _believed(self, width: int) -> None:
        """Nothing is odd about this width any more."""
        self._odd[width].clear()
        self._doubted.discard(width)

    def _move(self, width: int, surprise: float, *, is_plain: bool) -> None:
        """All widths are relative to plain passes, so that a plain pass changes mostly the machine's pace."""
        self._drift += (c.PLAIN_RATE if is_plain else c.DRIFT_RATE) * surprise
        self._stale += abs(surprise) * c.PLAIN_RATE
        if width > 1:
            seen = self._local[width] + surprise
            self._passes[width] = passes = min(self._passes[width] + 1.0, c.MOST_OWN_PASSES)
            self._own[width] += (seen - self._own[width]) / passes
            self._smooth()

    def _jump(self, width: int, surprise: float) -> None:
        self._stale += abs(surprise)
        if width == 1:
            self._drift += surprise
        else:
            self._own[width] = self._local[width] + surprise
            self._smooth()

    def _smooth(self) -> None:
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
        times = np.exp(self._local) * (self._base_s + context_tokens * (context.fixed_s + ROWS * context.row_s))
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

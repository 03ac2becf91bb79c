"""What passes of the target and drafts cost, by rows: guessed or known before, corrected by every pass.

On a CPU a pass over several tokens costs more than one over a single token, in steps that differ from kernel to
kernel, so the only assumption about the curve is that it does not fall: a narrow pass can always be padded to a wider
one. Nothing is measured before the first token: a first run begins with a line, a pass of one row costs what the first
plain passes take, and each further row a share of that, which is too low for many kernels. A few passes put that right,
and the time bank limits what they can lose; a share that is too high would be believed for ever, since nothing would be
verified. Up to eight rows our kernels are bound by reading the weights and beyond by computing, so the line has a bend
there; what single widths take beside it is learnt too, for kernels whose costs rise in steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.control import constants as c

WIDEST = 65  # rows of the widest pass that has a price
_WIDTHS = np.arange(WIDEST + 1)
_MOST_STALE, _MOST_DRIFTED = 0.01, 0.002  # how much widths, and the pace, may move until a table is made anew
_FIRST_PLAIN, _MOST_ROW_PASSES = 2, 24.0
_BEND = 8  # rows from which on another one costs another share
_BELIEVED, _KNOWN_BY = 3, 6.0  # large deviations in a row that are believed; passes that they count for then
_GUESSED_BYTES_PER_S, _GUESSED_PASS_S = 1e10, 2e-4  # the unit of time until the first plain passes were timed
Array = NDArray[np.float64]


def _likenesses() -> Array:
    """[WIDEST + 1, WIDEST + 1]: how much a pass of one width says about another one; 0 on the diagonal.

    0 to and from plain passes (row and column 1): all others are measured against them.
    """
    octaves = np.log2(np.maximum(_WIDTHS, 1))
    found: Array = np.exp(-np.abs(octaves[:, None] - octaves[None, :]) / c.LIKENESS)
    np.fill_diagonal(found, 0.0)
    found[:, :2] = found[:2, :] = 0.0
    return found


_LIKENESSES = _likenesses()


class CostCurve:
    """t(width) in seconds, from known times of a few widths, or guessed (`guessed`).

    What a pass costs behind a longer text is not known apart: it is learnt as a change of the machine's pace is.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        if not measured or min(measured) < 1 or min(measured.values()) <= 0:
            raise ValueError(f"a cost curve needs positive times of positive widths, got {dict(measured)}")
        self.is_scaled = True  # its times are in seconds of this machine, and not a guess
        self._base = _interpolated(measured)
        self._passes = np.zeros(WIDEST + 1)  # of each width
        self._own = np.zeros(WIDEST + 1)  # mean logarithm over the base that they took, drift aside
        self._local = np.zeros(WIDEST + 1)  # the same, smoothed over similar widths
        self._plain_s: list[float] = []  # the first plain passes of this run
        self._drift = 0.0
        self._odd: list[tuple[int, float]] = []  # (width, deviation) of the last passes, where all were large
        self._is_in_doubt = False  # wide passes were late again and again: a plain pass tells why
        # What another row costs, in plain passes, up to _BEND rows and beyond, where the base is a line; their weights.
        self._rows: list[float] | None = None
        self._weights, self._low = [c.ROW_WEIGHT, c.ROW_WEIGHT], 1
        self._stale, self._shape = 0.0, list[float]()  # how far widths moved since it was made
        self._table, self._table_shape, self._table_drift = list[float](), list[float](), 0.0

    @classmethod
    def guessed(cls, plain_s: float, low: int = 1, row: float = c.FIRST_ROW) -> Self:
        """A line. `plain_s`: seconds of a plain pass until some were timed; `low`: rows that one token is padded to.

        `row`: what a further row adds, in plain passes.
        """
        curve = cls({1: plain_s})
        # Beyond the bend no row is taken for cheap before one was timed.
        curve._rows, curve._low, curve.is_scaled = [row, max(row, c.FIRST_ROW)], low, False
        curve._redraw(plain_s)
        return curve

    def table(self) -> list[float]:
        """Seconds of a pass of width 0 (nothing) to WIDEST, never falling; another list when they have changed."""
        shape = self.shape
        if shape is not self._table_shape or abs(self._drift - self._table_drift) > _MOST_DRIFTED:
            self._table_shape, self._table_drift = shape, self._drift
            pace = self.pace
            self._table = [pace * pass_s for pass_s in shape]
        return self._table

    @property
    def shape(self) -> list[float]:
        """The table at the machine's usual pace; another list when what a width costs beside others has changed."""
        if self._stale > _MOST_STALE or not self._shape:
            self._stale, self._shape = 0.0, self._made()
        return self._shape

    @property
    def pace(self) -> float:
        """How many times as long as usual all passes take now."""
        return math.exp(self._drift)

    def at(self, width: int) -> float:
        """Seconds of one pass."""
        return self.table()[width]

    @property
    def is_sure_of_plain(self) -> bool:
        """Whether plain passes were timed in this run, and nothing is in doubt: all else is relative to them."""
        return self.is_scaled and bool(self._plain_s) and not self._is_in_doubt

    @property
    def is_sure_of_rows(self) -> bool:
        """Whether what a row costs is more than a guess."""
        return self._rows is None or max(self._weights) >= c.ROW_WEIGHT + 2

    def observe(self, width: int, seconds: float, *, is_plain: bool = False) -> None:
        """Learn from a pass that took `seconds`. `is_plain`: it is the plain pass of as many sequences."""
        if not 1 <= width <= WIDEST or seconds <= 0:
            return
        if width <= self._low and len(self._plain_s) <= _FIRST_PLAIN:
            self._plain_s.append(seconds)
        if not self.is_scaled:
            if len(self._plain_s) < _FIRST_PLAIN:
                return
            self._redraw(min(self._plain_s))  # the first pass of a run often waits for its weights
            self.is_scaled = True
            return
        if self._rows is not None and width > self._low:
            self._learn_row(width, seconds)  # first, so that only the rest counts as this width's own
        self._follow(width, seconds, is_plain=is_plain or width == 1)

    def _follow(self, width: int, seconds: float, *, is_plain: bool) -> None:
        """Move a little towards one pass: a plain one tells mostly of the machine's pace."""
        ratio = math.log(seconds / float(self._base[width]))
        surprise = ratio - self._drift - float(self._local[width])
        if is_plain and (self._is_in_doubt or len(self._plain_s) <= _FIRST_PLAIN):
            self._resolve(surprise)
            return
        self._note(width, surprise, is_plain=is_plain)
        surprise = max(-c.MOST_SURPRISE, min(c.MOST_SURPRISE, surprise))
        self._drift += (c.PLAIN_RATE if is_plain else c.DRIFT_RATE) * surprise
        if width > 1:
            before = self._local[width]
            self._passes[width] = passes = min(self._passes[width] + 1.0, c.MOST_OWN_PASSES)
            self._own[width] += (before + surprise - self._own[width]) / passes
            self._smooth()
            self._stale += abs(self._local[width] - before)

    def _note(self, width: int, surprise: float, *, is_plain: bool) -> None:
        """After three large deviations in one direction costs have changed, as behind a longer context.

        Of wide passes a plain one tells first how much of that is the machine's: in a moment of slowness short drafts
        would look dear, would not be drafted any more, and nothing would ever put that right.
        """
        if abs(surprise) <= c.MOST_SURPRISE or (self._odd and (self._odd[0][1] > 0) != (surprise > 0)):
            self._odd.clear()
            self._is_in_doubt = False
        if abs(surprise) > c.MOST_SURPRISE:
            self._odd.append((width, surprise))
        if len(self._odd) < _BELIEVED:
            return
        self._is_in_doubt = True
        if is_plain:
            self._resolve(surprise)

    def _resolve(self, surprise: float) -> None:
        """A plain pass deviated by `surprise`; what wide ones deviated more lately is the fault of their width."""
        self._drift += surprise if self._is_in_doubt else min(surprise, c.MOST_SURPRISE)
        for width, each in self._odd:
            if width > 1 and abs(each - surprise) > c.MOST_SURPRISE:
                self._own[width] = self._local[width] + each - surprise
                self._passes[width] = max(self._passes[width], _KNOWN_BY)
        self._smooth()
        self._is_in_doubt = False
        self._odd.clear()
        self._stale += 1.0

    def _learn_row(self, width: int, seconds: float) -> None:
        """Learn what a row costs from a pass. One late pass may raise it by little: the first of a width often is."""
        assert self._rows is not None
        part, before = (0, 0.0) if width <= _BEND else (1, self._rows[0] * (_BEND - self._low))
        count = width - (_BEND if part else self._low)
        row = self._rows[part]
        seen = (seconds / (float(self._base[1]) * self.pace) - 1.0 - before) / count
        seen = min(max(seen, 0.0), c.MOST_ROW, c.MOST_ROW * row + 0.1)
        self._weights[part] = min(self._weights[part] + 1.0, _MOST_ROW_PASSES)
        row += (seen - row) / self._weights[part]
        if abs(row - self._rows[part]) * count > 2 * _MOST_STALE:
            self._rows[part] = row
            if self._weights[1] == c.ROW_WEIGHT:
                self._rows[1] = max(self._rows[0], self._rows[1])
            self._redraw(float(self._base[1]))

    def _redraw(self, plain_s: float) -> None:
        """Draw the line anew; widths that were run keep their times."""
        assert self._rows is not None
        before, (first, later) = self._base, self._rows
        rows = first * np.clip(_WIDTHS - self._low, 0, _BEND - self._low) + later * np.maximum(_WIDTHS - _BEND, 0)
        self._base = plain_s * (1.0 + rows)
        self._base[0] = 0.0
        self._own[1:] -= np.where(self._passes[1:] > 0, np.log(self._base[1:] / before[1:]), 0.0)
        self._smooth()
        self._stale += 1.0

    def _smooth(self) -> None:
        """What each width costs beyond the base, from its own passes and, while these are few, from similar widths.

        Drafts have many lengths, so each width is seen rarely. Without smoothing the largest of several noisy times
        would make all wider passes look as expensive, since the curve never falls, and drafts would be too long.
        """
        own = self._passes * self._own
        of_others = (_LIKENESSES @ own) / (_LIKENESSES @ self._passes + c.FORMER_PASSES)
        self._local = (own + c.FORMER_PASSES * of_others) / (self._passes + c.FORMER_PASSES)

    def _made(self) -> list[float]:
        times = np.exp(self._local) * self._base
        # A width that was never run costs no less than the narrower ones that were.
        is_seen = self._passes > 0
        is_seen[1] = True
        np.maximum(times, np.maximum.accumulate(np.where(is_seen, times, 0.0)), out=times, where=~is_seen)
        # Made non-decreasing: midway between the lowest such curve above the times and the highest one below.
        above, below = np.maximum.accumulate(times), np.minimum.accumulate(times[::-1])[::-1]
        found: list[float] = (0.5 * (above + below)).tolist()
        return found

    def to_json(self) -> dict[str, Any]:
        """What was learnt, for the next run; empty while no plain pass was timed."""
        if not self.is_scaled or self._rows is None:
            return {}
        widths = np.flatnonzero(self._passes)
        return {
            "plain": float(self._base[1]) * self.pace,
            "rows": list(zip(self._rows, self._weights, strict=True)),
            "widths": [[int(width), float(self._passes[width]), float(self._own[width])] for width in widths],
        }

    @classmethod
    def from_json(cls, kept: object, low: int = 1) -> Self | None:
        """The curve that `to_json` returned; None for anything else."""
        try:
            assert isinstance(kept, Mapping)
            plain_s = float(kept["plain"])
            (first, weight), (later, its_weight) = (map(float, part) for part in kept["rows"])
            widths = [(int(width), float(passes), float(own)) for width, passes, own in kept["widths"]]
        except (AssertionError, KeyError, TypeError, ValueError):
            return None
        rows, weights = [first, later], [weight, its_weight]
        is_sound = 0 < plain_s < math.inf and all(0 <= row <= c.MOST_ROW for row in rows)
        is_sound = is_sound and all(c.ROW_WEIGHT <= each <= _MOST_ROW_PASSES for each in weights)
        if not is_sound or not all(1 < w <= WIDEST and 0 < n < math.inf and abs(own) < 20 for w, n, own in widths):
            return None
        curve = cls.guessed(plain_s, low)
        curve._rows, curve._weights, curve.is_scaled = rows, weights, True
        curve._redraw(plain_s)
        for width, passes, own in widths:
            curve._passes[width], curve._own[width] = passes, own
        curve._smooth()
        return curve


def guessed_plain_s(weight_bytes: int) -> float:
    """Seconds of a plain pass over so many bytes, as a unit of time until one was timed."""
    return _GUESSED_PASS_S + weight_bytes / _GUESSED_BYTES_PER_S


def _interpolated(measured: Mapping[int, float]) -> Array:
    """Seconds by width 0..WIDEST: straight lines between measured widths, the last slope beyond them."""
    known = sorted(measured.items())
    if len(known) == 1:
        known.append((2 * known[0][0], 2 * known[0][1]))
    found = [0.0]
    for width in range(1, WIDEST + 1):
        right = min(max(bisect_right(known, (width, math.inf)), 1), len(known) - 1)
        (low, low_s), (high, high_s) = known[right - 1 : right + 1]
        found.append(max(low_s + (high_s - low_s) * (width - low) / (high - low), min(measured.values())))
    return np.array(found)


@dataclass(slots=True)
class DraftCost:
    """Seconds that a drafter takes: `token_s` per drafted token, `read_s` per committed token that it must read first.

    `is_relative`: both are in units of a plain pass of the target, which has not been timed yet. `is_once`: `token_s`
    is of a whole draft, whatever its length.
    """

    token_s: float = 0.0
    read_s: float = 0.0
    is_relative: bool = False
    is_once: bool = False
    _seen: int = field(default=0, init=False)
    _read: int = field(default=0, init=False)
    _among: dict[int, DraftCost] = field(default_factory=dict, init=False)

    @classmethod
    def guessed(cls, share: float) -> Self:
        """Of a draft model with `share` of its target's weights, relative until `scale`."""
        token = min(0.02 + c.DRAFT_SHARE * share, 1.0)
        return cls(token, c.READ_SHARE * token, is_relative=True)

    @property
    def is_observed(self) -> bool:
        """Whether a draft was timed."""
        return self._seen > 0

    def among(self, num_sequences: int) -> DraftCost:
        """The cost to one of `num_sequences` that draft together: its share of their passes, a guess until timed."""
        if num_sequences == 1:
            return self
        if num_sequences not in self._among:
            share = (1.0 + c.SHARED_DRAFT_ROW * (num_sequences - 1)) / num_sequences
            self._among[num_sequences] = DraftCost(self.token_s * share, self.read_s, self.is_relative, self.is_once)
        return self._among[num_sequences]

    def scale(self, plain_s: float) -> None:
        """A plain pass takes `plain_s`: convert to seconds."""
        for shared in self._among.values():
            shared.scale(plain_s)
        if self.is_relative:
            self.token_s, self.read_s, self.is_relative = self.token_s * plain_s, self.read_s * plain_s, False

    def of(self, num_tokens: int, num_uncached: int) -> float:
        return self._times(num_tokens) * self.token_s + num_uncached * self.read_s

    @property
    def next_s(self) -> float:
        """Of one more token of a draft."""
        return 0.0 if self.is_once else self.token_s

    @property
    def once_s(self) -> float:
        """Of a draft, beside its tokens."""
        return self.token_s if self.is_once else 0.0

    def _times(self, num_tokens: int) -> int:
        """How often a draft costs `token_s`."""
        return min(num_tokens, 1) if self.is_once else num_tokens

    def observe(self, num_tokens: int, num_uncached: int, seconds: float) -> None:
        """Learn from one draft; the cost of reading only if that was most of the work."""
        if num_tokens < 1:
            return
        drafting_s = self._times(num_tokens) * self.token_s
        if num_uncached > 4 * num_tokens and self.token_s:
            self._read += 1  # the initial value is a guess here, too
            rate = max(1.0 / (self._read + 1), c.COST_RATE)
            self.read_s = moved(self.read_s, max(seconds - drafting_s, 0.0) / num_uncached, rate)
        elif num_uncached <= 2 * num_tokens + 2:
            # The first drafts count for more: the initial value is a guess, or from bare passes.
            self._seen += 1
            rate = max(1.0 / (self._seen + 1), c.COST_RATE)
            own_s = max(seconds - num_uncached * self.read_s, 0.1 * seconds)
            self.token_s = moved(self.token_s, own_s / self._times(num_tokens), rate)


def moved(old: float, seen: float, rate: float = c.COST_RATE) -> float:
    """`old` moved towards `seen`; the step of an outlier is limited."""
    if old <= 0:
        return seen
    surprise = math.log(max(seen, 1e-9) / old)
    return old * math.exp(rate * max(-c.MOST_DRAFT_SURPRISE, min(c.MOST_DRAFT_SURPRISE, surprise)))

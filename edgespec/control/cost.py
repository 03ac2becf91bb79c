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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edgespec.control import constants as c
from edgespec.platform.disk_cache import Seconds

WIDEST = 65  # rows of the widest pass that has a price
_WIDTHS = np.arange(WIDEST + 1)
_MOST_STALE = 0.01  # how much widths may move until the table is made anew
_FIRST_PLAIN, _MOST_ROW_PASSES = 2, 24.0
BEND = 8  # rows from which on another one costs another share
_BELIEVED, _KNOWN_BY = 3, 6.0  # large deviations in a row that are believed; passes that they count for then
_GUESSED_BYTES_PER_S, _GUESSED_PASS_S = 1e10, 2e-4  # the unit of time until the first plain passes were timed
Array = NDArray[np.float64]
_Row: TypeAlias = tuple[
    Annotated[float, Meta(ge=0, le=c.MOST_ROW)], Annotated[float, Meta(ge=c.ROW_WEIGHT, le=_MOST_ROW_PASSES)]
]
_Width: TypeAlias = Annotated[int, Meta(gt=1, le=WIDEST)]
_Own: TypeAlias = Annotated[float, Meta(gt=-20, lt=20)]


class _Kept(msgspec.Struct):
    """What a curve learnt: seconds of a plain pass, both rows with their weights, and (width, passes, own) of each."""

    plain: Seconds
    rows: tuple[_Row, _Row]
    widths: list[tuple[_Width, Annotated[float, Meta(gt=0, le=c.MOST_OWN_PASSES)], _Own]]


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
        self._plain_s: list[float] = []  # the first plain passes of this run
        self._drift = 0.0
        self._odd: list[tuple[int, float]] = []  # (width, deviation) of the last passes, where all were large
        self._is_in_doubt = False  # wide passes were late again and again: a plain pass tells why
        # What another row costs, in plain passes, up to BEND rows and beyond, where the base is a line; their weights.
        self._rows: list[float] | None = None
        self._weights, self._low = [c.ROW_WEIGHT, c.ROW_WEIGHT], 1
        self._stale, self._shape = 0.0, list[float]()  # how far widths moved since it was made

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
        """Seconds of a pass of width 0 (nothing) to WIDEST, never falling."""
        pace = self.pace
        return [pace * pass_s for pass_s in self.shape]

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
        """Seconds of one pass; beyond WIDEST, rows cost the average of the table's upper half."""
        shape = self.shape
        if width <= WIDEST:
            return self.pace * shape[width]
        half = WIDEST // 2
        row = (shape[WIDEST] - shape[half]) / (WIDEST - half)
        return self.pace * (shape[WIDEST] + (width - WIDEST) * row)

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
        before = float(self._local(width)) if width > 1 else 0.0
        surprise = ratio - self._drift - before
        if is_plain and (self._is_in_doubt or len(self._plain_s) <= _FIRST_PLAIN):
            self._resolve(surprise)
            return
        self._note(width, surprise, is_plain=is_plain)
        surprise = max(-c.MOST_SURPRISE, min(c.MOST_SURPRISE, surprise))
        self._drift += (c.PLAIN_RATE if is_plain else c.DRIFT_RATE) * surprise
        if width > 1:
            self._passes[width] = passes = min(self._passes[width] + 1.0, c.MOST_OWN_PASSES)
            self._own[width] += (before + surprise - self._own[width]) / passes
            self._stale += abs(float(self._local(width)) - before)

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
        for width, each in dict(self._odd).items():
            if width > 1 and abs(each - surprise) > c.MOST_SURPRISE:
                self._own[width] = self._local(width) + each - surprise
                self._passes[width] = max(self._passes[width], _KNOWN_BY)
        self._is_in_doubt = False
        self._odd.clear()
        self._stale += 1.0

    def _learn_row(self, width: int, seconds: float) -> None:
        """Learn what a row costs from a pass. One late pass may raise it by little: the first of a width often is."""
        assert self._rows is not None
        part, before = (0, 0.0) if width <= BEND else (1, self._rows[0] * (BEND - self._low))
        count = width - (BEND if part else self._low)
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
        rows = first * np.clip(_WIDTHS - self._low, 0, BEND - self._low) + later * np.maximum(_WIDTHS - BEND, 0)
        self._base = plain_s * (1.0 + rows)
        self._base[0] = 0.0
        self._own[1:] -= np.where(self._passes[1:] > 0, np.log(self._base[1:] / before[1:]), 0.0)
        self._stale += 1.0

    def _local(self, width: int | slice) -> Any:
        """What a width costs beyond the base, from its own passes and, while these are few, from similar widths.

        In logarithms, as `_own`. Drafts have many lengths, so each width is seen rarely. Without smoothing the largest
        of several noisy times would make all wider passes look as expensive, since the curve never falls, and drafts
        would be too long.
        """
        likeness, passes = _LIKENESSES[width], self._passes
        of_others = (likeness @ (passes * self._own)) / (likeness @ passes + c.FORMER_PASSES)
        return (passes[width] * self._own[width] + c.FORMER_PASSES * of_others) / (passes[width] + c.FORMER_PASSES)

    def _made(self) -> list[float]:
        times = np.exp(self._local(slice(None))) * self._base
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
        widths, rows = np.flatnonzero(self._passes), zip(self._rows, self._weights, strict=True)
        own = zip(widths.tolist(), self._passes[widths].tolist(), self._own[widths].tolist(), strict=True)
        return {"plain": float(self._base[1]) * self.pace, "rows": list(rows), "widths": list(own)}

    @classmethod
    def from_json(cls, kept: object, low: int = 1) -> Self | None:
        """The curve that `to_json` returned; None for anything else."""
        try:
            found = msgspec.convert(kept, _Kept)
        except msgspec.ValidationError:
            return None
        curve = cls.guessed(found.plain, low)
        curve._rows, curve._weights = (list(part) for part in zip(*found.rows, strict=True))
        curve.is_scaled = True
        curve._redraw(found.plain)
        for width, passes, own in found.widths:
            curve._passes[width], curve._own[width] = passes, own
        return curve


def guessed_plain_s(weight_bytes: int) -> float:
    """Seconds of a plain pass over so many bytes, as a unit of time until one was timed."""
    return _GUESSED_PASS_S + weight_bytes / _GUESSED_BYTES_PER_S


def _interpolated(measured: Mapping[int, float]) -> Array:
    """Seconds by width 0..WIDEST: straight lines between measured widths, the last slope beyond them."""
    known = sorted(measured.items())
    if len(known) == 1:
        known.append((2 * known[0][0], 2 * known[0][1]))
    (low, low_s), (high, high_s) = known[-2:]
    beyond = np.maximum(_WIDTHS - high, 0) * (high_s - low_s) / (high - low)
    widths, seconds = zip(*known, strict=True)
    found: Array = np.maximum(np.interp(_WIDTHS, widths, seconds) + beyond, min(measured.values()))
    found[0] = 0.0
    return found


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

    def scale(self, plain_s: float) -> None:
        """A plain pass takes `plain_s`: convert to seconds."""
        if self.is_relative:
            self.token_s, self.read_s, self.is_relative = self.token_s * plain_s, self.read_s * plain_s, False

    def measured(self, token_s: float, read_s: float) -> None:
        """It took so long, in seconds."""
        self.token_s, self.read_s, self.is_relative = token_s, read_s, False
        self._among.clear()

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
            self._among[num_sequences] = DraftCost(self.token_s * share, self.read_s, is_once=self.is_once)
        return self._among[num_sequences]

    @property
    def next_s(self) -> float:
        """Of one more token of a draft."""
        return 0.0 if self.is_once else self.token_s

    @property
    def once_s(self) -> float:
        """Of a draft, beside its tokens."""
        return self.token_s if self.is_once else 0.0

    def of(self, num_tokens: int, num_uncached: int) -> float:
        return self.next_s * num_tokens + self.once_s * (num_tokens > 0) + num_uncached * self.read_s

    def observe(self, num_tokens: int, num_uncached: int, seconds: float) -> None:
        """Learn from one draft; the cost of reading only if that was most of the work."""
        if num_tokens < 1:
            return
        # The first drafts count for more: the initial values are guesses, or from bare passes.
        if num_uncached > 4 * num_tokens and self.token_s:
            self._read += 1
            reading_s = max(seconds - self.of(num_tokens, 0), 0.0) / num_uncached
            self.read_s = moved(self.read_s, reading_s, max(1.0 / (self._read + 1), c.COST_RATE))
        elif num_uncached <= 2 * num_tokens + 2:
            self._seen += 1
            own_s = max(seconds - num_uncached * self.read_s, 0.1 * seconds)
            token_s = own_s if self.is_once else own_s / num_tokens
            self.token_s = moved(self.token_s, token_s, max(1.0 / (self._seen + 1), c.COST_RATE))


def moved(old: float, seen: float, rate: float = c.COST_RATE) -> float:
    """`old` moved towards `seen`; the step of an outlier is limited."""
    if old <= 0:
        return seen
    surprise = math.log(max(seen, 1e-9) / old)
    return old * math.exp(rate * max(-c.MOST_DRAFT_SURPRISE, min(c.MOST_DRAFT_SURPRISE, surprise)))

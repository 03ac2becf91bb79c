"""What passes of the target and drafts cost, by rows: guessed or known before, corrected by every pass.

On a CPU a pass over several tokens costs more than one over a single token, in steps that differ from kernel to
kernel, so the only assumption about the curve is that it does not fall: a narrow pass can always be padded to a wider
one. Nothing is measured before the first token: a first run begins with a line, a pass of one row costs what the first
plain passes take, and each further row a share of that, which is too low for many kernels. A few passes put that right,
and the time bank limits what they can lose; a share that is too high would be believed for ever, since nothing would be
verified.

What is learnt is the average cost of a further row, for each width: drafts have many lengths, so a pass tells of its
own width, less of similar ones, and of all those of which nothing else is known.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Self, TypeAlias

import msgspec
from msgspec import Meta

from edgespec.control import constants as c
from edgespec.platform.disk_cache import Seconds

WIDEST = 65  # rows of the widest pass that has a price
_FIRST_PLAIN = 2
_BELIEVED = 3  # large deviations in a row that are believed
_GUESSED_BYTES_PER_S, _GUESSED_PASS_S = 1e10, 2e-4  # the unit of time until the first plain passes were timed
_Row: TypeAlias = Annotated[float, Meta(ge=0, le=c.MOST_ROW)]
_OCTAVES = [math.log2(max(width - 1, 1)) for width in range(WIDEST + 1)]
_LIKENESSES = [[math.exp(-abs(one - other) / c.LIKENESS) for other in _OCTAVES] for one in _OCTAVES]
"""[WIDEST + 1, WIDEST + 1]: how much a pass of one width says about another one."""


class _Kept(msgspec.Struct):
    """What a curve learnt: seconds of a plain pass, what a row costs by width, and passes over several rows `seen`."""

    plain: Seconds
    rows: Annotated[list[_Row], Meta(min_length=WIDEST + 1, max_length=WIDEST + 1)]
    seen: Annotated[int, Meta(ge=0)]


class CostCurve:
    """t(width) in seconds: at first a line, which passes correct.

    What a pass costs behind a longer text is not known apart: it is learnt as a change of the machine's pace is.
    """

    def __init__(self, plain_s: float, low: int = 1, row: float = c.FIRST_ROW) -> None:
        """`plain_s`: seconds of a plain pass until some were timed; `low`: rows that one token is padded to.

        `row`: what a further row adds, in plain passes.
        """
        self.is_scaled = False  # its times are in seconds of this machine, and not a guess
        self._usual_s, self._low = plain_s, low  # of a plain pass, at the usual pace
        self._rows = [row] * (WIDEST + 1)  # what a further row costs, in plain passes, by width
        self._passes = [c.GUESS_PASSES] * (WIDEST + 1)  # that each of these counts for
        self._num_seen = 0  # passes over several rows
        self._plain_s: list[float] = []  # the first plain passes of this run
        self._drift = 0.0
        self._odd: list[tuple[int, float]] = []  # (width, deviation) of the last passes, where all were large
        self._shape = list[float]()

    @property
    def shape(self) -> list[float]:
        """Seconds of passes of width 0 (nothing) to WIDEST at the usual pace, never falling; a new list if changed."""
        if not self._shape:
            usual_s, least = self._usual_s, 1 - self._low
            times = [usual_s * (1.0 + max(least + place, 0) * row) for place, row in enumerate(self._rows[1:])]
            # Made non-decreasing: midway between the lowest such curve above the times and the highest one below.
            below = list(accumulate(reversed(times), min))[::-1]
            above = accumulate(times, max)
            self._shape = [0.0, *(0.5 * (high + low) for high, low in zip(above, below, strict=True))]
        return self._shape

    @property
    def pace(self) -> float:
        """How many times as long as usual all passes take now."""
        return math.exp(self._drift)

    def at(self, width: int) -> float:
        """Seconds of one pass."""
        return self.pace * self.usually(width)

    def usually(self, width: int) -> float:
        """`at` the usual pace; beyond WIDEST, rows cost the average of the table's upper half."""
        shape = self.shape
        if width <= WIDEST:
            return shape[width]
        half = WIDEST // 2
        row = (shape[WIDEST] - shape[half]) / (WIDEST - half)
        return shape[WIDEST] + (width - WIDEST) * row

    @property
    def is_sure_of_plain(self) -> bool:
        """Whether plain passes were timed in this run, and nothing is in doubt: all else is relative to them."""
        return self.is_scaled and bool(self._plain_s) and not self._is_in_doubt

    @property
    def _is_in_doubt(self) -> bool:
        """Whether wide passes were late again and again: a plain pass tells why."""
        return len(self._odd) >= _BELIEVED

    @property
    def is_sure_of_rows(self) -> bool:
        """Whether what a row costs is more than a guess."""
        return self._num_seen >= c.KNOWN_AFTER

    def observe(self, width: int, seconds: float, *, is_plain: bool = False) -> None:
        """Learn from a pass that took `seconds`. `is_plain`: it is the plain pass of as many sequences."""
        if not 1 <= width <= WIDEST or seconds <= 0:
            return
        if width <= self._low and len(self._plain_s) <= _FIRST_PLAIN:
            self._plain_s.append(seconds)
        if not self.is_scaled:
            if len(self._plain_s) >= _FIRST_PLAIN:
                self._usual_s, self.is_scaled = min(self._plain_s), True  # the first pass often waits for its weights
                self._shape = []
            return
        surprise = math.log(seconds / (self.pace * self._own_s(width)))
        is_plain = is_plain or width == 1
        if is_plain and (self._is_in_doubt or len(self._plain_s) <= _FIRST_PLAIN):
            self._resolve(surprise)
            return
        is_guess = not is_plain and not self.is_sure_of_rows
        if not is_guess:
            self._note(width, surprise, is_plain=is_plain)
        limit = math.inf if is_guess else c.MOST_SURPRISE
        surprise = max(-limit, min(limit, surprise))
        if width > self._low:
            self._learn_row(width, surprise)
        if not is_guess:
            self._drift += (c.PLAIN_RATE if is_plain else c.DRIFT_RATE) * surprise

    def _own_s(self, width: int) -> float:
        """Seconds of a pass at the usual pace by what is known of its width alone."""
        return self._usual_s * (1.0 + max(width - self._low, 0) * self._rows[width])

    def _learn_row(self, width: int, surprise: float, *, is_local: bool = False) -> None:
        """A pass took exp(`surprise`) times as long as thought. `is_local`: nothing follows for widths that are unlike.

        One late pass raises the cost of a row by little: the first of a width often is late.
        """
        count, row = width - self._low, self._rows[width]
        is_known = self._passes[width] >= c.FORMER_PASSES
        most = c.MOST_ROW if is_known else min(c.MOST_ROW * row + 0.1, c.MOST_ROW)
        seen = min(max((self._own_s(width) / self._usual_s * math.exp(surprise) - 1.0) / count, 0.0), most)
        moved = seen - row
        if is_local:
            self._passes[width] = 0.0
        own, known, most_passes = self._passes[width], 0.0 if is_local else c.FORMER_PASSES, c.MOST_OWN_PASSES
        both = list(zip(self._passes, _LIKENESSES[width], strict=True))
        # No numpy: where its code is not in the cache, twelve calls take longer, on so few numbers.
        weights = [(like if n >= known else 1.0) / ((own if own > n else n) + 1.0) for n, like in both]
        moved_rows = [row + weight * moved for row, weight in zip(self._rows, weights, strict=True)]
        self._rows = [0.0 if row < 0.0 else row if row < c.MOST_ROW else c.MOST_ROW for row in moved_rows]
        self._passes = [n if (n := former + like * like) < most_passes else most_passes for former, like in both]
        self._num_seen, self._shape = self._num_seen + 1, []

    def _note(self, width: int, surprise: float, *, is_plain: bool) -> None:
        """After three large deviations in one direction costs have changed, as behind a longer context.

        Of wide passes a plain one tells first how much of that is the machine's: in a moment of slowness short drafts
        would look dear, would not be drafted any more, and nothing would ever put that right.
        """
        if abs(surprise) <= c.MOST_SURPRISE or (self._odd and (self._odd[0][1] > 0) != (surprise > 0)):
            self._odd.clear()
        if abs(surprise) > c.MOST_SURPRISE:
            self._odd.append((width, surprise))
        if is_plain and self._is_in_doubt:
            self._resolve(surprise)

    def _resolve(self, surprise: float) -> None:
        """A plain pass deviated by `surprise`; what wide ones deviated more lately is the fault of their width."""
        for width, each in dict(self._odd).items():
            if width > self._low and abs(each - surprise) > c.MOST_SURPRISE:
                self._learn_row(width, each - surprise, is_local=True)
        if self._is_in_doubt and surprise < -c.MOST_SURPRISE:  # as behind a short context again: rows may be cheap
            self._rows, self._shape = [min(row, c.FIRST_ROW) for row in self._rows], []
        self._drift += surprise if self._is_in_doubt else min(surprise, c.MOST_SURPRISE)
        self._odd.clear()

    def to_json(self) -> dict[str, Any]:
        """What was learnt, for the next run; empty while no plain pass was timed."""
        if not self.is_scaled:
            return {}
        return {"plain": self._usual_s * self.pace, "rows": self._rows, "seen": self._num_seen}

    @classmethod
    def from_json(cls, kept: object, low: int = 1) -> Self | None:
        """The curve that `to_json` returned; None for anything else."""
        try:
            found = msgspec.convert(kept, _Kept)
        except msgspec.ValidationError:
            return None
        curve = cls(found.plain, low)
        curve._rows, curve._passes = found.rows, [c.FORMER_PASSES] * (WIDEST + 1)
        curve._num_seen, curve.is_scaled = found.seen, True
        return curve


def guessed_plain_s(weight_bytes: int) -> float:
    """Seconds of a plain pass over so many bytes, as a unit of time until one was timed."""
    return _GUESSED_PASS_S + weight_bytes / _GUESSED_BYTES_PER_S


@dataclass(slots=True)
class DraftCost:
    """Seconds that a drafter takes: `token_s` per drafted token, `read_s` per committed token that it must read first.

    `is_relative`: both are guessed shares of the target's plain pass until a draft was timed. `is_once`: `token_s` is
    of a whole draft, whatever its length.
    """

    token_s: float = 0.0
    read_s: float = 0.0
    is_relative: bool = False
    is_once: bool = False
    num_seen: int = field(default=0, init=False)  # drafts that were timed
    _plain_s: float = field(default=1.0, init=False)  # the plain pass that a guess is a share of
    _among: dict[int, DraftCost] = field(default_factory=dict, init=False)

    @classmethod
    def guessed(cls, share: float, *, is_once: bool = False) -> Self:
        """Of a draft model or head with `share` of its target's weights, in plain passes until `scale`."""
        token = min(0.03 + c.DRAFT_SHARE * share, 1.0)
        return cls(token, c.READ_SHARE * token, is_relative=True, is_once=is_once)

    def scale(self, plain_s: float) -> None:
        """A plain pass takes `plain_s` now: a guess follows it.

        Kept as the first passes had it, which are late on a busy machine, it would look dear and never be tried.
        """
        if self.is_relative:
            change = plain_s / self._plain_s
            self.token_s, self.read_s, self._plain_s = self.token_s * change, self.read_s * change, plain_s

    def among(self, num_sequences: int) -> DraftCost:
        """The cost to one of `num_sequences` that draft together: its share of their passes, a guess until timed."""
        if num_sequences == 1:
            return self
        if num_sequences not in self._among:
            share = (1.0 + c.SHARED_DRAFT_ROW * (num_sequences - 1)) / num_sequences
            self._among[num_sequences] = among = copy(self)
            among.token_s, among.num_seen, among._among = self.token_s * share, 0, {}
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
            self.read_s = moved(self.read_s, max(seconds - self.of(num_tokens, 0), 0.0) / num_uncached)
        elif num_uncached <= 2 * num_tokens + 2:
            self.num_seen, self.is_relative = self.num_seen + 1, False
            own_s = max(seconds - num_uncached * self.read_s, 0.1 * seconds)
            token_s = own_s if self.is_once else own_s / num_tokens
            self.token_s = moved(self.token_s, token_s, max(1.0 / (self.num_seen + 1), c.COST_RATE))


def moved(old: float, seen: float, rate: float = c.COST_RATE) -> float:
    """`old` moved towards `seen`; the step of an outlier is limited."""
    if old <= 0:
        return seen
    surprise = math.log(max(seen, 1e-9) / old)
    return old * math.exp(rate * max(-c.MOST_DRAFT_SURPRISE, min(c.MOST_DRAFT_SURPRISE, surprise)))

"""What passes cost: the target's time by width and context, and a drafter's time by token, kept true by every pass.

On a processor a pass over several tokens costs more than one over a single token, in steps that differ from kernel to
kernel, so nothing is assumed of the curve but that it does not fall: a narrow pass can always be padded to a wider
one. Machines are noisy and heat up, so each observation moves the curve a little, and an outlier no more than others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Self

import numpy as np
from numpy.typing import NDArray

WIDEST = 65
_WIDTHS = np.arange(WIDEST + 1)
_DRIFT_RATE, _PLAIN_RATE = 0.05, 0.15
_FORMER_PASSES = 2.0  # that what was known of a width before its first pass is worth
_MOST_PASSES = 32.0  # of one width, that are remembered
_LIKENESS = 0.35  # octaves, over which what a pass says of others fades
_MOST_SURPRISE = 0.3  # largest believed deviation of a single pass, in natural logarithms of its time
_FIRST_LATENESS = 0.15  # in logarithms: how far the first plain passes of a run may differ to be believed singly
_COST_RATE, _MOST_DRAFT_SURPRISE = 0.1, 2.0
_FIRST_PASSES = 3
_MOST_STALE = 0.01  # by which a table of costs may be out of date, in logarithms: making one is not free
_CONTEXT_STEP = 64  # tokens of context by which a table of costs may be out of date


@dataclass(frozen=True, slots=True)
class ContextCost:
    """Seconds that each cached token adds to a pass: `fixed_s` whatever its width, `row_s` for every row."""

    fixed_s: float = 0.0
    row_s: float = 0.0

    def at(self, width: int, context_tokens: int) -> float:
        return context_tokens * (self.fixed_s + width * self.row_s)


def _likenesses() -> NDArray[np.float64]:
    """[WIDEST + 1, WIDEST + 1]: how much a pass of one width says of another one, none of itself.

    Nothing to and from plain passes (row and column 1): they are the measure of all others.
    """
    octaves = np.log2(np.maximum(_WIDTHS, 1))
    found: NDArray[np.float64] = np.exp(-np.abs(octaves[:, None] - octaves[None, :]) / _LIKENESS)
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
        self._local = np.zeros(WIDEST + 1)  # the same as it is believed, those of similar widths considered
        self._first: list[float] = []  # logarithms of the first plain passes over the base
        self._odd: dict[int, list[float]] = {}  # what the latest passes of each width were off by, where that was a lot
        self._drift = 0.0
        self._stale = 0.0  # how much has been learnt since the table was made, in logarithms
        self._table: list[float] = []
        self._table_step = -1

    def table(self, context_tokens: int) -> list[float]:
        """Seconds of a pass of width 0 (nothing) to WIDEST, never falling, with `context_tokens` in the cache."""
        step = context_tokens // _CONTEXT_STEP
        if step != self._table_step:
            self._table_step = step
            self._stale = 0.0
            self._table = self._rebuilt(step * _CONTEXT_STEP)
        return self._table

    def at(self, width: int, context_tokens: int = 0) -> float:
        """Seconds of one pass."""
        return self.table(context_tokens)[width]

    def observe(self, width: int, context_tokens: int, seconds: float) -> None:
        """Learn from a pass that took `seconds`."""
        if not 1 <= width <= WIDEST or seconds <= 0:
            return
        ratio = math.log(seconds / (self._base[width] + self.context.at(width, context_tokens)))
        if width > 1 or len(self._first) == _FIRST_PASSES:
            self._follow(width, ratio)
        else:
            self._first.append(ratio)
            self._drift = median(self._first)  # what was measured before may be of a busier machine
            if len(self._first) < _FIRST_PASSES:
                self._drift = min(self._drift, _FIRST_LATENESS)
            self._table_step = -1
        if self._stale > _MOST_STALE:
            self._table_step = -1

    @property
    def is_scaled(self) -> bool:
        """Whether its times are in seconds of this machine, and not a guess."""
        return True

    def is_sure_of_plain(self) -> bool:
        """Whether plain passes were timed in this run, and the last one was not much faster than believed before.

        Slower is no harm: a plain pass that is thought too cheap makes drafts look worse than they are.
        """
        if len(self._first) < _FIRST_PASSES:
            return bool(self._first) and self._first[-1] > -_FIRST_LATENESS
        odd = self._odd.get(1)
        return not (odd and odd[0] < 0)

    def _follow(self, width: int, ratio: float) -> None:
        """Move a little towards one pass; if three in a row were surprising in one direction, all the way to them."""
        surprise = ratio - self._drift - float(self._local[width])
        odd = self._odd.setdefault(width, [])
        if abs(surprise) <= _MOST_SURPRISE or (odd and (odd[0] > 0) != (surprise > 0)):
            odd.clear()
        if abs(surprise) > _MOST_SURPRISE:
            odd.append(surprise)
        if len(odd) < _FIRST_PASSES:
            self._move(width, max(-_MOST_SURPRISE, min(_MOST_SURPRISE, surprise)))
        else:
            self._believe(width, median(odd))
            odd.clear()

    def _move(self, width: int, surprise: float) -> None:
        """A plain pass is what all others are compared with: what it shows is the machine's pace, and never its own."""
        self._drift += (_PLAIN_RATE if width == 1 else _DRIFT_RATE) * surprise
        self._stale += abs(surprise) * _PLAIN_RATE
        if width > 1:
            seen = self._local[width] + surprise
            self._passes[width] = passes = min(self._passes[width] + 1.0, _MOST_PASSES)
            self._own[width] += (seen - self._own[width]) / passes
            self._judge()

    def _believe(self, width: int, surprise: float) -> None:
        self._stale += abs(surprise)
        if width == 1:
            self._drift += surprise
        else:
            self._own[width] = self._local[width] + surprise
            self._judge()

    def _judge(self) -> None:
        """What each width costs beyond the base: its own passes say it, those of widths like it as long as it has few.

        Drafts are of many lengths, so that each width by itself is seen seldom. Of several noisy times the greatest
        would make all wider passes look dear and, since a curve does not fall, alike: too long drafts would be made.
        """
        others = _LIKENESSES @ self._passes
        of_others = _LIKENESSES @ (self._passes * self._own) / (others + _FORMER_PASSES)
        self._local = (self._passes * self._own + _FORMER_PASSES * of_others) / (self._passes + _FORMER_PASSES)

    def refined(self) -> dict[int, float]:
        """The times by measured width as they are believed now, to begin with next time; drift is not kept."""
        return {width: self._base[width] * math.exp(self._local[width]) for width in self.measured}

    def _rebuilt(self, context_tokens: int) -> list[float]:
        context, scale = self.context, math.exp(self._drift)
        times = np.exp(self._local) * (self._base_s + context_tokens * (context.fixed_s + _WIDTHS * context.row_s))
        times[0] = 0.0
        # A width that was never run costs no less than the narrower ones that were, whatever the base says of it.
        is_seen = self._passes > 0
        is_seen[1] = True
        np.maximum(times, np.maximum.accumulate(np.where(is_seen, times, 0.0)), out=times, where=~is_seen)
        # It never falls: between the least such curve above the times and the greatest below them.
        above, below = np.maximum.accumulate(times), np.minimum.accumulate(times[::-1])[::-1]
        found: list[float] = (0.5 * scale * (above + below)).tolist()
        return found


def never_falling(measured: Mapping[int, float]) -> dict[int, float]:
    """The nearest curve that does not fall, by pooling neighbours that do (Ayer et al. 1955), one width one vote.

    A lucky time of a wide pass would otherwise make every narrower one look as cheap.
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


@dataclass(slots=True)
class DraftCost:
    """Seconds that a drafter takes: `token_s` per drafted token, `read_s` per committed token that it lags behind.

    `is_relative`: both are in plain passes of the target, as long as it is not known what these take.
    """

    token_s: float = 0.0
    read_s: float = 0.0
    is_relative: bool = False
    _seen: int = field(default=0, init=False)

    @property
    def is_observed(self) -> bool:
        """Whether a draft was timed."""
        return self._seen > 0

    def scale(self, plain_s: float) -> None:
        """A plain pass takes `plain_s`: from now on this is in seconds."""
        if self.is_relative:
            self.token_s, self.read_s, self.is_relative = self.token_s * plain_s, self.read_s * plain_s, False

    def of(self, num_tokens: int, num_uncached: int) -> float:
        return num_tokens * self.token_s + num_uncached * self.read_s

    def observe(self, num_tokens: int, num_uncached: int, seconds: float) -> None:
        """Learn from one draft; what reading took shows only where it was most of the work."""
        if num_tokens < 1:
            return
        drafting_s = num_tokens * self.token_s
        if num_uncached > 4 * num_tokens and self.token_s:
            self.read_s = _moved(self.read_s, max(seconds - drafting_s, 0.0) / num_uncached, _COST_RATE)
        elif num_uncached <= 2 * num_tokens + 2:
            # The first drafts count for more: what was measured before is a bare pass, without choosing a token.
            self._seen += 1
            rate = max(1.0 / (self._seen + 1), _COST_RATE)
            self.token_s = _moved(
                self.token_s, max(seconds - num_uncached * self.read_s, 0.1 * seconds) / num_tokens, rate
            )


@dataclass(slots=True)
class RoundCost:
    """Seconds that a speculative round takes beyond its draft, its pass and what its tokens cost in any mode.

    Judging a draft, taking back what does not stand and learning from it are nothing beside the pass of a large model
    and more than that of a tiny one. `token_s`: what choosing a token takes when nothing is drafted.
    """

    token_s: float = 0.0
    round_s: float = 0.0

    @classmethod
    def of(cls, kept: object) -> Self:
        """As `kept` gave it; nothing known for anything else."""
        is_kept = isinstance(kept, list) and len(kept) == 2 and all(isinstance(s, float) and 0 <= s < 1 for s in kept)
        return cls(*kept) if is_kept and isinstance(kept, list) else cls()

    def kept(self) -> list[float]:
        """For the next run, as JSON."""
        return [self.token_s, self.round_s]

    def decoded(self, judge_s: float) -> None:
        """A plain round took `judge_s` to choose its token."""
        self.token_s = _moved(self.token_s, judge_s, _COST_RATE)

    def speculated(self, num_tokens: int, seconds: float) -> float:
        """A round of `num_tokens` took `seconds` besides drafting and its pass; how many of them speculation caused."""
        extra_s = max(seconds - num_tokens * self.token_s, 0.0)
        self.round_s = _moved(self.round_s, max(extra_s, 1e-7), _COST_RATE)
        return extra_s


def _moved(old: float, seen: float, rate: float) -> float:
    """`old` moved towards what was seen, by no more than an outlier deserves."""
    if old <= 0:
        return seen
    surprise = math.log(max(seen, 1e-9) / old)
    return old * math.exp(rate * max(-_MOST_DRAFT_SURPRISE, min(_MOST_DRAFT_SURPRISE, surprise)))

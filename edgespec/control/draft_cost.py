"""What a run costs besides the target's passes: drafts, and the work of a round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

from edgespec.control import constants as c


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
            self.read_s = _moved(self.read_s, max(seconds - drafting_s, 0.0) / num_uncached, rate)
        elif num_uncached <= 2 * num_tokens + 2:
            # The first drafts count for more: the initial value is from bare passes, without choosing a token.
            self._seen += 1
            rate = max(1.0 / (self._seen + 1), c.COST_RATE)
            own_s = max(seconds - num_uncached * self.read_s, 0.1 * seconds)
            self.token_s = _moved(self.token_s, own_s / self._times(num_tokens), rate)


@dataclass(slots=True)
class RoundCost:
    """The overhead in seconds of a speculative round, beyond its draft, its pass and what its tokens cost in any mode.

    Judging a draft, rolling back what was rejected and learning from it are negligible beside a large model's pass, and
    take longer than a tiny one's. `token_s`: choosing one token when nothing is drafted. `round_s`: the overhead of
    the round itself. `after_s`: how much longer a plain pass takes after a speculative round than after a plain one,
    since llama.cpp rebuilds its graph when the width changes (a tenth of a plain pass for 135M in 30 layers). `last`:
    the share of speculative rounds that a plain one follows.
    """

    token_s: float = 0.0
    round_s: float = 0.0
    after_s: float = 0.0
    last: float = 1.0
    _timed: int = 0  # how many passes `after_s` was learned from

    @classmethod
    def from_json(cls, kept: object) -> Self:
        """What `to_json` returned; the default for anything else."""
        is_kept = isinstance(kept, list) and len(kept) == 3 and all(isinstance(s, float) and 0 <= s < 1 for s in kept)
        return cls(*kept) if is_kept and isinstance(kept, list) else cls()

    def to_json(self) -> list[float]:
        """What was learnt, for the next run."""
        return [self.token_s, self.round_s, max(self.after_s, 0.0)]

    @property
    def price_s(self) -> float:
        """What a speculative round is expected to cost besides its draft and its pass."""
        return self.round_s + self.last * max(self.after_s, 0.0)

    def decoded(self, judge_s: float) -> None:
        """A plain round took `judge_s` to choose its token."""
        self.token_s = _moved(self.token_s, judge_s, c.COST_RATE)

    def speculated(self, num_tokens: int, seconds: float) -> float:
        """A round of `num_tokens` took `seconds` besides drafting and its pass; returns the part due to speculation."""
        extra_s = max(seconds - num_tokens * self.token_s, 0.0)
        self.round_s = _moved(self.round_s, max(extra_s, 1e-7), c.COST_RATE)
        return extra_s

    def followed(self, late_s: float | None) -> None:
        """The round after a speculative one was plain and took `late_s` more than usual, or speculated too (None)."""
        self.last += c.COST_RATE * ((late_s is not None) - self.last)
        if late_s is not None:
            self._timed += 1
            self.after_s += max(1.0 / self._timed, c.COST_RATE) * (late_s - self.after_s)


def _moved(old: float, seen: float, rate: float) -> float:
    """`old` moved towards `seen`; the step of an outlier is limited."""
    if old <= 0:
        return seen
    surprise = math.log(max(seen, 1e-9) / old)
    return old * math.exp(rate * max(-c.MOST_DRAFT_SURPRISE, min(c.MOST_DRAFT_SURPRISE, surprise)))


def guessed_draft_cost(share: float, engine: str = "") -> DraftCost:
    """The prior for a draft model with `share` of its target's weights, relative until `DraftCost.scale`.

    `engine`: the name of the one that runs it.
    """
    token = min(0.02 + c.DRAFT_SHARE * share, 1.0)
    return DraftCost(token, c.READ_SHARE.get(engine, c.READ_SHARE[""]) * token, is_relative=True)

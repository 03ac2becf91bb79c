"""The time bank: caps the time that speculation can lose, however wrong the predictions are.

A run is credited (1 + share) times what plain decoding would have taken for its tokens, and charged what it took. A
round may speculate only when the bank can pay its worst case, one token for the whole pass and draft. So at every
moment elapsed - excused <= (1 + share) * (tokens * plain + prefill) + start, for each run and not only on average.

Time lost to the machine rather than to a drafter is excused: of a pass of the target what it took beyond 1.5 times its
known cost (plain decoding would wait too), and of drafting, deciding and judging most of a stall (`own_work`). A
suspended laptop or a draft that was paged out costs seconds; saving these from a share of plain passes would switch
speculation off for tens of thousands of tokens. Among n rounds with stalls of at most S seconds, at most
log2(4 * S / plain) + 2 + n / 1024 are excused, so a drafter that is always late is charged.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from edgespec.control import constants as c

_MOST_REST = 32  # plain rounds; one is timed between such rests


@dataclass(slots=True)
class TimeBank:
    """Seconds that speculation may still lose, at most `share` of plain decoding's time.

    `balance_s`: what this generation, or the concurrent ones, may spend; `stalls`: how often the fine for a stall has
    doubled; `on_time`: rounds since the last stall; `is_guessed`: no pass has been timed yet, so the balance is not in
    seconds of this machine.
    """

    share: float
    balance_s: float
    stalls: int = 0
    on_time: int = 0
    is_guessed: bool = False

    def can_pay(self, round_s: float, plain_s: float) -> bool:
        """Whether the bank can pay a round of `round_s` for one token, which takes `plain_s` in plain decoding."""
        return self.balance_s + (1.0 + self.share) * plain_s >= round_s

    def rest(self, round_s: float, plain_s: float) -> int:
        """How many plain rounds it takes until the bank can pay as in `can_pay`, up to 32.

        Deciding takes time too, in which nothing would be saved where a pass takes hardly longer.
        """
        credit_s, lacking_s = self.share * plain_s, round_s - (1.0 + self.share) * plain_s - self.balance_s
        return math.ceil(min(lacking_s / credit_s, _MOST_REST)) if credit_s else _MOST_REST

    def longest(self, most: int, round_s: Callable[[int], float], plain_s: float) -> int:
        """Tokens of the longest draft, up to `most`, that half of the balance can pay, or else all of it.

        `round_s(count)`, never falling: seconds of a round with a draft of `count` tokens. The other half is kept for
        later rounds: where wide passes are expensive, an answer's first three drafts would otherwise spend everything.
        """
        for held_s in (min(c.RISKED * self.balance_s, self.balance_s), self.balance_s):
            afforded_s = held_s + (1.0 + self.share) * plain_s
            if most and round_s(most) <= afforded_s:
                return most
            if count := bisect_right(range(1, most + 1), afforded_s, key=round_s):
                return count
        return 0

    def own_work(self, seconds: float, expected_s: float, plain_s: float) -> float:
        """What to charge for `seconds` of drafting, deciding and judging that were expected to take `expected_s`.

        All of them, unless the machine stalled: then the usual time and a fine, which doubles with each stall and is
        at most the time lost.
        """
        stall_s = seconds - (1.0 + c.LATE) * expected_s - c.LATE * plain_s
        if stall_s <= 0:
            self.on_time += 1
            if self.stalls and self.on_time >= c.FORGIVEN_AFTER:
                self.stalls, self.on_time = self.stalls - 1, 0
            return seconds
        fine_s = 0.5 * c.LATE * plain_s * 2.0**self.stalls
        self.on_time = 0
        if fine_s >= stall_s:
            return seconds
        self.stalls += 1
        return seconds - stall_s + fine_s

    def settle(self, num_tokens: int, round_s: float, plain_s: float) -> None:
        """A round emitted `num_tokens` in `round_s` seconds; each takes `plain_s` in plain decoding."""
        self.balance_s += (1.0 + self.share) * num_tokens * plain_s - round_s

    def open(self, most_s: float, prefill_s: float, least_s: float = -math.inf) -> None:
        """A generation begins with at most `most_s`: earlier gains must not pay for one slow answer.

        `prefill_s`: what reading its prompt took, which plain decoding needs too; a share of it may be lost as well, so
        that a draft model can read a long prompt. `least_s`: what this generation may lose whatever earlier ones lost.
        """
        self.balance_s = min(max(self.balance_s, least_s), most_s) + self.share * prefill_s

"""One round: what was decided, and a draft whose tokens cost time, which goes on while a token is expected to pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.control.bank import TimeBank
from edgespec.control.branches import best_nodes
from edgespec.control.cost import DraftCost
from edgespec.control.drafter_state import DrafterState
from edgespec.control.length import FORESIGHT, forecast
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import Draft, Evidence


@dataclass(slots=True)
class PaidRound:
    """Asks a paid drafter, and learns from its draft what it costs and what to expect of it.

    `lag`: committed tokens that it must read first; `pass_s[w]`: seconds of a round with a pass of width w; `rate`:
    tokens per second that the run earns; `ahead_s`: `least_ahead` of `pass_s`.
    """

    drafter: Drafter
    state: DrafterState
    cost: DraftCost
    bank: TimeBank
    clock: Callable[[], float]
    num_uncached: int
    pass_s: list[float]
    ahead_s: list[float]
    rate: float
    draft: Draft | None = None
    confidences: Sequence[float] = ()  # of its tokens
    gain: float = 0.0  # tokens that verifying the draft promises over a plain round, now that its tokens are known
    seconds: float = 0.0  # that drafting took
    reading_s: float = 0.0  # of these, for text that the drafter lacked

    @property
    def is_promising(self) -> bool:
        return self.net_gain > 0

    @property
    def net_gain(self) -> float:
        """The gain less what drafting costs."""
        return 0.0 if self.draft is None else self.gain - self.rate * self.cost.of(self.draft.num_tokens, 0)

    @property
    def expected_s(self) -> float:
        """What was known before of the time that this draft takes; infinite where nothing was."""
        if self.draft is None:
            return 0.0
        is_known = self.cost.token_s > 0 and (self.cost.read_s > 0 or self.num_uncached <= 4 * self.draft.num_tokens)
        return self.cost.of(self.draft.num_tokens, self.num_uncached) if is_known else math.inf

    def affordable(self, most: int) -> int:
        """How many tokens, at most, the bank risks: it pays if all of them fail."""
        pass_s, cost, num_uncached = self.pass_s, self.cost, self.num_uncached
        return self.bank.longest(most, lambda count: pass_s[count + 1] + cost.of(count, num_uncached), pass_s[1])

    def drafted(self, request: DraftRequest, most: int) -> tuple[Draft, list[float], int]:
        """(all that was drafted of at most `most` tokens, their confidences, how many of them are worth verifying)."""
        pass_s, ahead_s, rate, token_s = self.pass_s, self.ahead_s, self.rate, self.cost.token_s
        judge, upcoming = self.state.calibrator.judge(), self.state.upcoming
        found: list[float] = []
        reach = 1.0

        def should_continue(count: int, evidence: Evidence) -> bool:
            nonlocal reach
            confidence = judge(count - 1, evidence)
            found.append(confidence)
            reach *= confidence
            if count >= most or reach <= rate * (ahead_s[count + 1] + token_s):
                return False  # tokens that were certain would not pay
            if reach * upcoming.expected(confidence) > rate * (pass_s[count + 2] - pass_s[count + 1] + token_s):
                return True  # the next token pays by itself, as it mostly does; otherwise those behind it may
            ahead = upcoming.chain(confidence, min(most - count, FORESIGHT))
            return forecast(count, reach, ahead, pass_s, ahead_s, token_s, rate, most)[0] > 0

        row_cost = rate * ((pass_s[most + 1] - pass_s[1]) / most + token_s)
        started_s = self.clock()
        draft = self.drafter.draft(
            request._replace(max_tokens=most, should_continue=should_continue, row_cost=row_cost)
        )
        self.seconds = self.clock() - started_s
        asked_each = draft.is_chain and len(found) == draft.num_tokens
        confidences = found if asked_each else list(self.state.confidences(draft))
        self.draft, self.confidences = draft, confidences
        length, self.gain = best_nodes(draft, confidences, pass_s, ahead_s, rate, most)
        return draft, confidences, length

    def learn(self, *, is_disturbed: bool = False) -> None:
        """From the draft, what its drafter costs and what its next tokens are to be expected to be worth."""
        if self.draft is not None:
            if not is_disturbed:
                self.cost.observe(self.draft.num_tokens, self.num_uncached, self.seconds)
            self.reading_s = self.num_uncached * self.cost.read_s
            self.state.asked(self.net_gain)
            self.state.upcoming.observe_chain(self.confidences[: self.draft.main_chain.num_tokens])


@dataclass(slots=True)
class Round:
    """The decision of the round in progress, kept until its outcome is known."""

    trials: dict[str, Draft]  # what the free drafters drafted
    lengths: dict[str, int]  # how many tokens of each are worth verifying
    gains: dict[str, float]
    chosen: str | None
    is_refresh: bool  # nothing is drafted so that a plain pass is timed again
    paid: PaidRound | None = None

    @property
    def reading_s(self) -> float:
        """Of the draft's time, for text that its drafter lacked."""
        return 0.0 if self.paid is None else self.paid.reading_s

    def net_tokens(self, used: str | None, gained: float, rate: float) -> dict[str, float]:
        """By drafter, as far as it is known: the tokens of the round beyond a plain one's, net of their cost.

        `used`: whose draft was verified; `gained`: what came of the round; `rate`: tokens per second that it earns.
        """
        # A paid drafter that was not asked counts as half of what it expected: neither punished nor trusted for it.
        net = {name: 0.5 * gain for name, gain in self.gains.items() if name not in self.trials}
        if self.paid is not None and self.chosen is not None:
            net[self.chosen] = gained  # whoever's draft was verified: this is what came of asking
        if used is not None and used != self.chosen and self.paid is not None:
            # By itself a free drafter that took over would not have waited for the other one.
            net[used] = gained + rate * (self.paid.seconds - self.paid.reading_s)
        elif used is not None:
            net[used] = gained
        return net

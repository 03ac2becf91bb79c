"""One round until its outcome is known: what was decided, what a paid drafter drafted, and drafts left unused."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from edgespec.control import constants as c
from edgespec.control.bank import TimeBank
from edgespec.control.choice import DrafterState
from edgespec.control.length import Prices, best_nodes, forecast
from edgespec.control.run_cost import DraftCost
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import Draft, Evidence, TokenIds


@dataclass(slots=True)
class PaidRound:
    """Asks a paid drafter, whose draft goes on while a token is expected to pay, and learns what to expect of it.

    `num_uncached`: committed tokens that it must read first.
    """

    drafter: Drafter
    state: DrafterState
    cost: DraftCost
    prices: Prices
    num_uncached: int
    draft: Draft | None = None
    confidences: Sequence[float] = ()  # of its tokens
    gain: float = 0.0  # tokens expected of verifying the draft over a plain round, now that its tokens are known
    seconds: float = 0.0  # that drafting took
    reading_s: float = 0.0  # of these, for text that the drafter lacked

    @property
    def is_promising(self) -> bool:
        return self.net_gain > 0

    @property
    def net_gain(self) -> float:
        """The gain less what drafting costs."""
        return 0.0 if self.draft is None else self.gain - self.prices.rate * self.cost.of(self.draft.num_tokens, 0)

    @property
    def expected_s(self) -> float:
        """What was known before of the time that this draft takes; infinite where nothing was."""
        if self.draft is None:
            return 0.0
        is_known = self.cost.token_s > 0 and (self.cost.read_s > 0 or self.num_uncached <= 4 * self.draft.num_tokens)
        return self.cost.of(self.draft.num_tokens, self.num_uncached) if is_known else math.inf

    def affordable(self, most: int, bank: TimeBank) -> int:
        """How many tokens, at most, the bank risks: it pays if all of them fail."""
        pass_s, cost, num_uncached = self.prices.pass_s, self.cost, self.num_uncached
        return bank.longest(most, lambda count: pass_s[count + 1] + cost.of(count, num_uncached), pass_s[1])

    def drafted(self, request: DraftRequest, most: int, clock: Callable[[], float]) -> tuple[Draft, list[float], int]:
        """(all that was drafted of at most `most` tokens, their confidences, how many of them to verify)."""
        pass_s, ahead_s, rate = prices = self.prices
        token_s, judge, upcoming = self.cost.token_s, self.state.calibrator.judge(), self.state.upcoming
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
            ahead = upcoming.chain(confidence, min(most - count, c.FORESIGHT))
            return forecast(count, reach, ahead, prices, token_s, most)[0] > 0

        row_cost = rate * ((pass_s[most + 1] - pass_s[1]) / most + token_s)
        started_s = clock()
        draft = self.drafter.draft(
            request._replace(max_tokens=most, should_continue=should_continue, row_cost=row_cost)
        )
        self.seconds = clock() - started_s
        asked_each = draft.is_chain and len(found) == draft.num_tokens
        confidences = found if asked_each else list(self.state.confidences(draft))
        self.draft, self.confidences = draft, confidences
        length, self.gain = best_nodes(draft, confidences, prices, most)
        return draft, confidences, length

    def learn(self, *, is_disturbed: bool = False) -> None:
        """From the draft, what its drafter costs and what to expect of its next tokens."""
        if self.draft is not None:
            if not is_disturbed:
                self.cost.observe(self.draft.num_tokens, self.num_uncached, self.seconds)
            self.reading_s = self.num_uncached * self.cost.read_s
            self.state.asked(self.net_gain)
            self.state.upcoming.observe_chain(self.confidences[: self.draft.main_chain.num_tokens])


@dataclass(slots=True)
class Round:
    """What each drafter is expected to gain in the round in progress, and who was chosen."""

    prices: Prices
    trials: dict[str, Draft]  # what the free drafters drafted
    lengths: dict[str, int]  # how many tokens of each to verify
    gains: dict[str, float]
    uncached: dict[str, int]  # tokens that each paid drafter would have to read first
    chosen: str | None = None
    is_refresh: bool = False  # nothing is drafted so that a plain pass is timed again
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


@dataclass(frozen=True, slots=True)
class Shadow:
    """A draft that its drafter made for position `start`; `kept` of its tokens would have been verified.

    `gains`: what every drafter expected of that round; `cost_tokens`: what verifying would have cost, in tokens.
    """

    drafter: str
    start: int
    draft: Draft
    kept: int
    gains: Mapping[str, float]
    cost_tokens: float


class Shadows:
    """Drafts that wait for the text that decides about them."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Shadow, list[int], int]] = deque(maxlen=c.MOST_PENDING)  # its tokens; how many agree

    def clear(self) -> None:
        self._pending.clear()

    def add(self, shadow: Shadow) -> None:
        if shadow.draft.num_tokens:
            self._pending.append((shadow, shadow.draft.token_ids.tolist(), 0))

    def resolved(self, token_ids: TokenIds) -> Iterator[tuple[Shadow, int]]:
        """Each draft that the committed `token_ids` [n] decide, with how many of its tokens agree from the first on."""
        if not self._pending:
            return
        begin = min(shadow.start + agreed for shadow, _, agreed in self._pending)
        told = token_ids[begin:].tolist()
        for _ in range(len(self._pending)):
            shadow, drafted, agreed = self._pending.popleft()
            place = shadow.start + agreed - begin
            while agreed < len(drafted) and place < len(told) and drafted[agreed] == told[place]:
                agreed, place = agreed + 1, place + 1
            if agreed < len(drafted) and place >= len(told):
                self._pending.append((shadow, drafted, agreed))
            else:
                yield shadow, agreed

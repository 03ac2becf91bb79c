"""The state of one round: what was decided, what a paid drafter reads and drafts, and which drafts were not used."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from edgespec.control import constants as c
from edgespec.control.bank import TimeBank
from edgespec.control.choice import DrafterState
from edgespec.control.draft_cost import DraftCost
from edgespec.control.length import Prices, best_nodes, forecast
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.engines.sequence import Passes
from edgespec.types import Draft, Evidence, TokenIds


def to_read(
    drafter: Drafter, token_ids: TokenIds, cost: DraftCost, state: DrafterState, prices: Prices, balance_s: float
) -> int:
    """Tokens that a paid drafter has to read first: all that it lacks, or as many as the bank can pay.

    What it drafts from a part of a long text is verified as any draft is, so trying it costs little. The rest is read
    once the bank can pay for it, and what the drafter gains in the rounds over which it is spread.
    """
    if not cost.read_s:
        return drafter.num_uncached(token_ids)
    balance_s = max(balance_s, 0.0)
    whole_s = balance_s
    if state.times_asked < c.FIRST_TRIALS:
        whole_s *= c.FIRST_READING
    elif state.score <= 0:
        whole_s *= c.PROBE_READING
    elif drafter.reads_part:
        whole_s = min(whole_s * c.FIRST_READING, state.score * c.READING_ROUNDS / prices.rate)
    is_long = token_ids.size * cost.read_s > c.LONG_READING * prices.pass_s[1]
    has_waited = state.probe_in <= -c.READING_ROUNDS
    part_s = c.PART_READING * balance_s if is_long or has_waited else 0.0
    return drafter.reading(token_ids, int(whole_s / cost.read_s), int(part_s / cost.read_s))


@dataclass(slots=True)
class PaidRound:
    """Asks a paid drafter for a draft that continues while a further token is expected to pay, and learns from it.

    `num_uncached`: committed tokens that the drafter must read first.
    """

    drafter: Drafter
    state: DrafterState
    cost: DraftCost
    prices: Prices
    num_uncached: int
    draft: Draft | None = None
    confidences: Sequence[float] = ()  # in the tokens of the draft
    gain: float = 0.0  # tokens that verifying the draft is expected to gain over a plain round
    seconds: float = 0.0  # spent on drafting
    reading_s: float = 0.0  # the part spent on reading text that the drafter had not seen

    @property
    def is_promising(self) -> bool:
        return self.net_gain > 0

    @property
    def net_gain(self) -> float:
        """The gain less what drafting costs."""
        return 0.0 if self.draft is None else self.gain - self.prices.rate * self.cost.of(self.draft.num_tokens, 0)

    @property
    def expected_s(self) -> float:
        """The expected time of this draft by its known costs; infinite where these are unknown."""
        if self.draft is None:
            return 0.0
        is_known = self.cost.token_s > 0 and (self.cost.read_s > 0 or self.num_uncached <= 4 * self.draft.num_tokens)
        return self.cost.of(self.draft.num_tokens, self.num_uncached) if is_known else math.inf

    def affordable(self, most: int, bank: TimeBank) -> int:
        """The most tokens that the bank can pay if none is accepted."""
        pass_s, cost, num_uncached = self.prices.pass_s, self.cost, self.num_uncached
        return bank.longest(most, lambda count: pass_s[count + 1] + cost.of(count, num_uncached), pass_s[1])

    def drafting(
        self, request: DraftRequest, most: int, clock: Callable[[], float]
    ) -> Passes[tuple[Draft, list[float], int]]:
        """Draft at most `most` tokens. Returns (the draft, its confidences, how many tokens to verify)."""
        pass_s, ahead_s, rate = prices = self.prices
        token_s, predict, upcoming = self.cost.next_s, self.state.calibrator.predictor(), self.state.upcoming
        found: list[float] = []
        reach = 1.0

        def should_continue(count: int, evidence: Evidence) -> bool:
            nonlocal reach
            confidence = predict(count - 1, evidence)
            found.append(confidence)
            reach *= confidence
            if count >= most or reach <= rate * (ahead_s[count + 1] + token_s):
                return False  # even tokens that are certain would not pay
            if reach * upcoming.expected(confidence) > rate * (pass_s[count + 2] - pass_s[count + 1] + token_s):
                return True  # the next token pays by itself, the usual case; if not, later ones may
            ahead = upcoming.chain(confidence, min(most - count, c.FORESIGHT))
            return forecast(count, reach, ahead, prices, token_s, most)[0] > 0

        row_cost = rate * ((pass_s[most + 1] - pass_s[1]) / most + token_s)
        started_s = clock()
        draft = yield from self.drafter.drafting(
            request._replace(max_tokens=most, should_continue=should_continue, row_cost=row_cost)
        )
        self.seconds = clock() - started_s
        asked_each = draft.is_chain and len(found) == draft.num_tokens
        confidences = found if asked_each else list(self.state.confidences(draft))
        self.draft, self.confidences = draft, confidences
        length, self.gain = best_nodes(draft, confidences, prices, most)
        return draft, confidences, length

    def learn(self, *, is_disturbed: bool = False, is_priced: bool = True) -> None:
        """Learn the drafter's cost, its gain and the expected confidence of its next tokens from the draft.

        `is_priced`: the costs of verifying drafts are more than a guess.
        """
        if self.draft is not None:
            if not is_disturbed:
                self.cost.observe(self.draft.num_tokens, self.num_uncached, self.seconds)
            self.reading_s = self.num_uncached * self.cost.read_s
            self.state.asked(self.net_gain if is_priced else None)
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
        """The part of the drafting time spent on reading text that the drafter had not seen."""
        return 0.0 if self.paid is None else self.paid.reading_s

    def net_tokens(self, used: str | None, gained: float, rate: float) -> dict[str, float]:
        """By drafter, as far as known: the tokens of the round beyond a plain one's, net of their cost.

        `used`: whose draft was verified; `gained`: what came of the round; `rate`: tokens per second that it earns.
        """
        # A paid drafter that was not asked counts with half of its expectation.
        net = {name: 0.5 * gain for name, gain in self.gains.items() if name not in self.trials}
        if self.paid is not None and self.chosen is not None:
            net[self.chosen] = gained  # the result of asking it, whichever draft was verified
        if used is not None and used != self.chosen and self.paid is not None:
            # Alone, the free drafter that took over would not have spent the paid one's time.
            net[used] = gained + rate * (self.paid.seconds - self.paid.reading_s)
        elif used is not None:
            net[used] = gained
        return net


@dataclass(frozen=True, slots=True)
class UnusedDraft:
    """An unused draft for position `start`, of which `kept` tokens would have been verified.

    `gains`: what each drafter expected of that round; `cost_tokens`: the cost of verifying it, in tokens.
    """

    drafter: str
    start: int
    draft: Draft
    kept: int
    gains: Mapping[str, float]
    cost_tokens: float


class UnusedDrafts:
    """Unused drafts until the text shows how many of their tokens were right: free drafters learn without a pass."""

    def __init__(self) -> None:
        # each with its tokens and how many of them agree so far
        self._pending: deque[tuple[UnusedDraft, list[int], int]] = deque(maxlen=c.MOST_PENDING)

    def clear(self) -> None:
        self._pending.clear()

    def add(self, unused: UnusedDraft) -> None:
        if unused.draft.num_tokens:
            self._pending.append((unused, unused.draft.token_ids.tolist(), 0))

    def resolved(self, token_ids: TokenIds) -> Iterator[tuple[UnusedDraft, int]]:
        """Each draft that the committed `token_ids` [n] decide, with the number of its first tokens that agree."""
        if not self._pending:
            return
        begin = min(unused.start + agreed for unused, _, agreed in self._pending)
        text = token_ids[begin:].tolist()
        for _ in range(len(self._pending)):
            unused, drafted, agreed = self._pending.popleft()
            place = unused.start + agreed - begin
            while agreed < len(drafted) and place < len(text) and drafted[agreed] == text[place]:
                agreed, place = agreed + 1, place + 1
            if agreed < len(drafted) and place >= len(text):
                self._pending.append((unused, drafted, agreed))
            else:
                yield unused, agreed

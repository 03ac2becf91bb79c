"""The automatic controller: costs, calibrated confidence, the rate rule, a choice among drafters, a time bank.

One round: free drafters draft; what a paid one gains is known from its earlier drafts. Each has an expected gain over
plain decoding (`prices`), and the largest one is taken. A paid drafter is also asked now and then, so that its gain
stays known in each kind of text; where a free draft is expected to gain more than the draft that came of it, that one
is verified. The bank limits the length (`bank`). Costs and confidences are updated from the outcome, and from unused
drafts as soon as the text shows whether they were right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edgespec.control import constants as c
from edgespec.control.bank import TimeBank
from edgespec.control.base import NOTHING, Clock, Controller, Proposal
from edgespec.control.confidence import DrafterState, Logistic, UnusedDrafts
from edgespec.control.cost import DraftCost, moved
from edgespec.control.prices import Prices, RunCosts, best_length, best_nodes, may_pay, while_it_may_pay
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.engines.sequence import Passes
from edgespec.reports import RoundRecord
from edgespec.types import Draft, Evidence, TokenIds, Verdict

FREE = DraftCost()  # of a drafter that costs nothing


class Offer(NamedTuple):
    """A draft that may be verified: its first `length` tokens, expected to gain `gain` tokens over a plain round.

    `confidences`: in its tokens. Of a paid drafter, `cost` is what it costs, `num_uncached` the committed tokens that
    it had to read first, and `seconds` what it took for both.
    """

    drafter: str
    draft: Draft
    confidences: Sequence[float]
    length: int
    gain: float
    cost: DraftCost = FREE
    num_uncached: int = 0
    seconds: float = 0.0

    def first(self, length: int) -> Proposal:
        """Its first `length` tokens."""
        return Proposal(self.draft.first(length, self.confidences), self.drafter) if length else NOTHING

    @property
    def expected_s(self) -> float:
        """The expected time of this draft by its known costs; infinite where these are unknown."""
        is_known = self.cost.token_s > 0 and (self.cost.read_s > 0 or self.num_uncached <= 4 * self.draft.num_tokens)
        return self.cost.of(self.draft.num_tokens, self.num_uncached) if is_known else math.inf


@dataclass(slots=True)
class Round:
    """The round in progress: what each free drafter offers, and what asking each paid one is expected to gain."""

    prices: Prices
    offers: list[Offer] = field(default_factory=list)
    gains: dict[str, float] = field(default_factory=dict)
    uncached: dict[str, int] = field(default_factory=dict)  # tokens that each paid drafter would have to read first
    paid: Offer | None = None

    @property
    def best(self) -> Offer | None:
        """The offer of a free drafter that gains most; None if none gains anything."""
        best = max(self.offers, key=lambda offer: offer.gain, default=None)
        return best if best is not None and best.gain > 0 else None


class AutoController(Controller):
    """Decides drafter and draft length each round so that tokens per second are most and never below plain decoding's.

    It owns none of the drafters. `costs` are the model's; `share`: how much of plain decoding's time speculation may
    lose at most. `first`: the controller of another sequence, with which it shares its bank and what is known of the
    drafters, of which it may lack some. `clock` is there for simulations.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        costs: RunCosts,
        share: float = 0.02,
        clock: Clock = perf_counter,
        first: AutoController | None = None,
    ) -> None:
        super().__init__()
        self.drafters, self.costs = dict(drafters), costs
        self._clock = self._own_clock = clock
        self._paid = [name for name, drafter in drafters.items() if not drafter.is_free]
        self._serving = self.drafters  # those that may draft in this answer
        costs.add({name: drafter.costs_once for name, drafter in drafters.items()})
        self.bank = TimeBank(c.DRAFTING_SHARE * share, first_balance_s(costs.curve.at(1)), is_guessed=True)
        self.kinds: dict[str, dict[str, DrafterState]] = {}
        if first is not None:
            self.bank, self.kinds = first.bank, first.kinds
        self._states = self._of_kind("greedy")
        self._unused = UnusedDrafts()
        self._round: Round | None = None
        self._context_ids: TokenIds = np.empty(0, np.int32)  # of the round in progress
        self._prompt_tokens, self._prefill_s = 0, 0.0
        self._is_new = True  # no round of this answer was decided yet
        self._was_wide = False  # the previous pass
        self._learning_s = 0.0  # time spent on learning from the last round

    def _of_kind(self, kind: str) -> dict[str, DrafterState]:
        """What is known of each drafter in one kind of text."""
        states = self.kinds.setdefault(kind, {})
        for name, drafter in self.drafters.items():
            if name not in states:
                states[name] = DrafterState(Logistic(drafter.prior))
        return states

    def begin(self, prompt_ids: TokenIds, prefill_s: float = 0.0, clock: Clock | None = None) -> None:
        self._own_clock, self._prompt_tokens = clock or self._clock, prompt_ids.size
        for name, drafter in self.drafters.items():
            if name not in self._dropped:
                drafter.begin(prompt_ids)
        self._unused.clear()
        self._left_out &= self._dropped  # what failed in the last one may be asked again
        self._round, self._is_new, self._was_wide, self._resting, self._prefill_s = None, True, False, 0, prefill_s
        plain_s = self.costs.curve.at(1)
        least_s = c.RETRY_S if plain_s < c.RETRY_S else -math.inf
        self.bank.open(first_balance_s(2 * plain_s), prefill_s, least_s)

    # -- deciding

    def proposing(self, request: DraftRequest) -> Passes[Proposal]:
        costs, bank = self.costs, self.bank
        self._context_ids = request.token_ids
        if self._is_new:  # a request tells the kind of the whole answer
            self._is_new = False
            self._states = self._of_kind(kind_of(request, self._prompt_tokens))
            self._serving = {name: drafter for name, drafter in self.drafters.items() if drafter.serves(request)}
            self._allow(self._prefill_s / costs.curve.at(1))
        if not costs.curve.is_sure_of_plain:
            return NOTHING  # all costs are relative to plain decoding's, so that is timed first
        prices = costs.prices()
        if self._resting:
            bank.settle(self._resting, self._resting * prices.pass_s[1], prices.pass_s[1])
            self._allow(self._resting)
            self._resting = 0
        most = min(request.max_tokens, c.MAX_AUTO_LENGTH, costs.most_rows - 1)
        if most < 1:
            return NOTHING
        if not bank.can_pay(prices.pass_s[2], prices.pass_s[1]):
            if not costs.is_shared:  # beside others a pass takes longer than what is saved
                self._resting = bank.rest(prices.pass_s[2], prices.pass_s[1])
            return NOTHING
        request = request.at_most(most)
        self._round = decided = self._expected(request, prices)
        best, likely = decided.best, max(decided.gains, key=decided.gains.__getitem__, default=None)
        if likely is not None and decided.gains[likely] <= (0.0 if best is None else best.gain):
            likely = None
        if (asked := self._due(decided, most) or likely) is not None:
            return (yield from self._paid_proposal(decided, asked, request))
        return self._affordable(decided, best)

    def _expected(self, request: DraftRequest, prices: Prices) -> Round:
        """What each drafter is expected to gain: free ones draft, of paid ones it is known from earlier drafts."""
        found = Round(prices)
        for name, drafter in self._serving.items():
            if name in self._left_out:
                continue
            self._asked = name
            if not drafter.is_free:
                self._consider(found, name, request)
                continue
            state, asked = self._states[name], list[float]()
            trial = request._replace(should_continue=while_it_may_pay(state.calibrator.predictor(), prices, asked))
            draft = request.sampler.permitted(drafter.draft(trial), request.token_ids)
            if draft.num_tokens:
                count = draft.num_tokens
                confidences = asked[:count] if len(asked) >= count else state.confidences(draft)
                found.offers.append(Offer(name, draft, confidences, *best_length(confidences, prices, count)))
        return found

    def _consider(self, found: Round, name: str, request: DraftRequest) -> None:
        """What a paid drafter would have to read, and what it is expected to gain if it may be asked."""
        drafter, state, cost, prices = self.drafters[name], self._states[name], self.costs.draft(name), found.prices
        allowed_s = state.spendable / prices.rate
        most_s = min(allowed_s, self.bank.balance_s)
        if drafter.reads_part:  # the rest is read where what it gains anyway pays for it
            most_s = min(most_s, state.gain * c.READING_ROUNDS / prices.rate)
        found.uncached[name] = num_uncached = to_read(drafter, request.token_ids, cost, prices, most_s)
        first_s = cost.of(1, num_uncached)
        if first_s > allowed_s:
            return
        found.gains[name] = 0.0
        if self.bank.can_pay(prices.pass_s[2] + first_s, prices.pass_s[1]):
            most = request.max_tokens
            if not state.times_asked:
                usual = [c.USUAL_CONFIDENCE] * min(most, c.PROBE_EVERY)
                state.gain = max(gain_of_asking(usual, prices, most, cost), 0.0)
            reading = prices.rate * num_uncached * cost.read_s
            found.gains[name] = state.gain - reading / min(c.READING_ROUNDS, most)  # spread over so many rounds

    def _due(self, decided: Round, most: int) -> str | None:
        """A paid drafter that is due for a probe, and that can gain anything; one that is not allowed to waits."""
        for name in decided.uncached:
            self._states[name].probe_in -= 1
        for name in decided.gains:
            certain = [1.0] * c.MAX_AUTO_LENGTH
            is_due = self._states[name].probe_in < 0
            if is_due and gain_of_asking(certain, decided.prices, most, self.costs.draft(name)) > 0:
                self._states[name].probe_in = c.PROBE_EVERY  # other sequences need not try it in the same round
                return name
        return None

    def _affordable(self, decided: Round, offer: Offer | None) -> Proposal:
        """The part of an offer that the bank can afford after what a paid draft took of the round."""
        if offer is None:
            return NOTHING
        pass_s, spent_s = decided.prices.pass_s, 0.0 if decided.paid is None else decided.paid.seconds
        return offer.first(self.bank.longest(offer.length, lambda count: pass_s[count + 1] + spent_s, pass_s[1]))

    def _paid_proposal(self, decided: Round, name: str, request: DraftRequest) -> Passes[Proposal]:
        """A paid drafter's draft, as far as it pays, or a free one's that is expected to gain more."""
        self._asked = name
        pass_s, cost, num_uncached = decided.prices.pass_s, self.costs.draft(name), decided.uncached[name]
        allowed_s = self._states[name].allowed / decided.prices.rate - num_uncached * cost.read_s
        most = int(min(request.max_tokens, max(allowed_s / cost.next_s, 1) if cost.next_s else math.inf))
        most = self.bank.longest(most, lambda count: pass_s[count + 1] + cost.of(count, num_uncached), pass_s[1])
        best = decided.best
        if not most:
            return self._affordable(decided, best)
        decided.paid = paid = yield from self._drafted(decided, name, request, most)
        if paid.draft.distributions is None and best is not None and best.gain > paid.gain:
            return self._affordable(decided, best)
        return paid.first(paid.length)

    def _drafted(self, decided: Round, name: str, request: DraftRequest, most: int) -> Passes[Offer]:
        """At most `most` tokens of a paid drafter, as long as a further one is expected to pay."""
        prices, state, cost = decided.prices, self._states[name], self.costs.draft(name)
        pass_s, token_s, predict = prices.pass_s, cost.next_s, state.calibrator.predictor()
        found: list[float] = []
        reach = 1.0

        def should_continue(count: int, evidence: Evidence) -> bool:
            nonlocal reach
            found.append(predict(evidence))
            reach *= found[-1]
            return may_pay(count, reach, found[-1], prices, token_s, most)

        row_cost = prices.rate * ((pass_s[most + 1] - pass_s[1]) / most + token_s)
        started_s = self._own_clock()
        draft = yield from self.drafters[name].drafting(
            request._replace(max_tokens=most, should_continue=should_continue, row_cost=row_cost)
        )
        seconds = self._own_clock() - started_s
        asked_each = draft.is_chain and len(found) == draft.num_tokens
        confidences = found if asked_each else state.confidences(draft)
        length, gain = best_nodes(draft, confidences, prices, most)
        if draft.distributions is not None:
            length = draft.num_tokens  # under the rejection rule a sampled token is not dropped for what it is
        return Offer(name, draft, confidences, length, gain, cost, decided.uncached[name], seconds)

    # -- learning

    def observe(self, proposal: Proposal, verdict: Verdict, record: RoundRecord) -> None:
        started_s = self._clock()
        decided, self._round = self._round, None
        paid = None if decided is None else decided.paid
        plain_s = self.costs.plain_s()
        work_s, pass_s = self._charge(record, plain_s, 0.0 if paid is None else paid.expected_s)
        reading_s = 0.0
        if paid is not None and decided is not None:
            reading_s = paid.num_uncached * paid.cost.read_s
            self._learn_paid(paid, decided, record, pass_s - plain_s)
        self._allow(record.accepted_tokens + 1)
        self.costs.earned(record.accepted_tokens + 1, work_s + pass_s - reading_s)
        if proposal.drafter is not None:
            self.drafters[proposal.drafter].observe(proposal.draft, verdict)
            self._states[proposal.drafter].learn_verdict(proposal.draft, verdict)
        if decided is not None:
            self._learn_unused(decided, proposal, verdict, record.position)
        self._learning_s = self._clock() - started_s

    def _charge(self, record: RoundRecord, plain_s: float, expected_s: float) -> tuple[float, float]:
        """Settle the round with the bank, and learn what it cost. Returns seconds of (our own work, the pass).

        Neither counts stalls of the machine. `expected_s`: the expected time of drafting; infinite while its cost is
        unknown, so that all of it is charged. A plain pass after a wider one may take longer than usual, since
        llama.cpp plans its graph anew. Speculation pays for that, and the pass says nothing of what plain ones cost.
        """
        costs, bank, is_plain = self.costs, self.bank, record.drafter is None
        pass_s = min(record.verify_s, (1.0 + c.LATE) * costs.pass_s(record.width))
        was_wide, self._was_wide = self._was_wide and not costs.is_shared, not is_plain
        if is_plain:
            costs.choosing_s = moved(costs.choosing_s, record.judge_s)
            work_s = bank.own_work(record.draft_s + self._learning_s, expected_s, plain_s)
            charged_s = max(pass_s, plain_s) if was_wide else plain_s
        else:
            own_s = costs.observe_round(record.accepted_tokens + 1, record.judge_s + self._learning_s)
            work_s = bank.own_work(record.draft_s + own_s, expected_s + costs.round_s, plain_s)
            charged_s = pass_s
        bank.settle(record.accepted_tokens + 1, work_s + charged_s, plain_s)
        curve = costs.curve
        is_telling = not (is_plain and was_wide) or record.verify_s < plain_s or not curve.is_sure_of_plain
        if is_telling and not costs.was_shared:
            curve.observe(record.width, record.verify_s)
        if bank.is_guessed and curve.is_sure_of_plain:
            bank.balance_s = first_balance_s(curve.at(1)) + bank.share * self._prefill_s
            bank.stalls, bank.is_guessed = 0, False
        return work_s, pass_s

    def _learn_paid(self, paid: Offer, decided: Round, record: RoundRecord, rows_s: float) -> None:
        """A paid drafter's cost and gain, and what the round gained by it over the best free draft.

        `rows_s`: seconds that the pass took longer than a plain one. A stall is not the drafter's.
        """
        state, rate, best = self._states[paid.drafter], decided.prices.rate, decided.best
        gained = -rate * min(paid.seconds, (1.0 + c.LATE) * paid.expected_s)
        if record.drafter == paid.drafter:
            pass_s = rows_s + self.costs.round_s
            gained += record.accepted_tokens - rate * pass_s - (0.0 if best is None else best.gain)
        paid.cost.observe(paid.draft.num_tokens, paid.num_uncached, paid.seconds)
        net = paid.gain - rate * paid.cost.of(paid.draft.num_tokens, 0)
        state.asked(net if self.costs.curve.is_sure_of_rows else None)
        state.allow(gained)

    def _allow(self, num_tokens: float) -> None:
        """A share of what plain decoding does in `num_tokens` passes may be lost on each paid drafter."""
        for name in self._paid:
            self._states[name].allow(self.bank.share * num_tokens)

    def _learn_unused(self, decided: Round, proposal: Proposal, verdict: Verdict, start: int) -> None:
        """Keep the drafts that were not verified, and learn from those that the text decides by now."""
        paid = decided.paid
        for offer in decided.offers if paid is None else [*decided.offers, paid]:
            if offer.drafter != proposal.drafter and offer.draft.distributions is None:
                self._unused.add(offer.drafter, start, offer.draft.main_chain)
        drafted = proposal.draft.token_ids.tolist()
        new_ids = [*(drafted[node] for node in verdict.accepted_nodes), verdict.next_token_id]
        for name, draft, agreed in self._unused.resolved(self._context_ids, new_ids):
            self._states[name].learn(draft, agreed)

    # -- kept between runs

    def to_json(self) -> dict[str, Any]:
        """What was learnt of the drafters, for the next run."""
        kinds = self.kinds.items()
        return {"kinds": {kind: {name: each.to_json() for name, each in states.items()} for kind, states in kinds}}

    def restore(self, kept: Any) -> None:
        """Continue from what `to_json` returned; what does not fit is ignored."""
        kinds = kept.get("kinds") if isinstance(kept, dict) else None
        for kind, drafters in kinds.items() if isinstance(kinds, dict) else ():
            states = self._of_kind(kind)
            for name in states.keys() & (drafters if isinstance(drafters, dict) else {}):
                with suppress(msgspec.ValidationError):
                    states[name].restore(drafters[name])


def kind_of(request: DraftRequest, prompt_tokens: int) -> str:
    """The kind of text: temperature, whether the rule compares distributions or a grammar constrains, a long prompt.

    Acceptance differs between them. Of answers about a long text fewer tokens of heads are accepted than of others.
    """
    temperature = request.sampler.sampling.temperature
    heat = "greedy" if temperature == 0 else "cool" if temperature < 0.5 else "warm" if temperature <= 1.1 else "hot"
    kind = f"{heat} rejection" if request.needs_distributions else heat
    kind = kind if request.sampler.constraint is None else f"{kind} constrained"
    return f"{kind} long" if prompt_tokens >= c.LONG_PROMPT else kind


def first_balance_s(plain_s: float) -> float:
    """What the bank has at first: a few plain passes, or a time that nobody notices, in which Python warms up."""
    return max(c.START_PASSES * plain_s, c.START_S)


def gain_of_asking(confidences: Sequence[float], prices: Prices, most: int, cost: DraftCost) -> float:
    """Tokens that a paid drafter gains by a draft of such confidences, less what it takes to make."""
    return best_length(confidences, prices, most, cost.next_s)[1] - prices.rate * cost.once_s


def to_read(drafter: Drafter, token_ids: TokenIds, cost: DraftCost, prices: Prices, allowed_s: float) -> int:
    """Tokens that a paid drafter has to read first: all that it lacks, or as many as `allowed_s` seconds may pay for.

    What it drafts from a part of a long text is verified as any draft is, so trying it costs little.
    """
    if not cost.read_s:
        return drafter.num_uncached(token_ids)
    allowed_s = max(allowed_s, 0.0)
    return drafter.reading(token_ids, int(allowed_s / cost.read_s), int(c.RISKED * allowed_s / cost.read_s))

"""The automatic controller: costs, calibrated confidence, the rate rule, a choice among drafters, a time bank.

One round: free drafters draft; what a paid one gains is known from its earlier drafts. Each has an expected gain over
plain decoding (`length`), and the largest one is taken. A paid drafter is also asked now and then, so that its gain
stays known in each kind of text (`choice`); where a free draft is expected to gain more than the draft that came of it,
that one is verified. The bank limits the length (`bank`). Costs and confidences are updated from the outcome, and from
unused drafts as soon as the text shows whether they were right.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np

from edgespec.control import constants as c
from edgespec.control.accounts import Accounts, RunCosts
from edgespec.control.bank import TimeBank
from edgespec.control.base import NOTHING, Clock, Controller, Proposal
from edgespec.control.choice import DrafterState, Kinds, UnusedDrafts, kind_of
from edgespec.control.cost import CostCurve, DraftCost
from edgespec.control.length import Prices, best_length, best_nodes, may_pay, while_it_may_pay
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.predicted import PREDICTION
from edgespec.engines.sequence import Passes
from edgespec.reports import RoundRecord
from edgespec.types import Draft, Evidence, TokenIds, Verdict


@dataclass(slots=True)
class PaidDraft:
    """A draft that took time. `num_uncached`: committed tokens that its drafter had to read first.

    `confidences`: in its tokens; `length`: tokens to verify, which is expected to gain `gain` tokens over a plain
    round; `seconds`: of drafting.
    """

    drafter: str
    cost: DraftCost
    num_uncached: int
    draft: Draft
    confidences: Sequence[float]
    length: int
    gain: float
    seconds: float

    @property
    def reading_s(self) -> float:
        """The part of the time spent on reading text that the drafter had not seen."""
        return self.num_uncached * self.cost.read_s

    @property
    def expected_s(self) -> float:
        """The expected time of this draft by its known costs; infinite where these are unknown."""
        is_known = self.cost.token_s > 0 and (self.cost.read_s > 0 or self.num_uncached <= 4 * self.draft.num_tokens)
        return self.cost.of(self.draft.num_tokens, self.num_uncached) if is_known else math.inf


class Trial(NamedTuple):
    """What a free drafter drafted, the confidence in each token, and how many of them to verify."""

    draft: Draft
    confidences: Sequence[float]
    length: int

    def proposal(self, name: str, length: int) -> Proposal:
        """Its first `length` tokens."""
        return Proposal(self.draft.first(length, self.confidences), name) if length else NOTHING


@dataclass(slots=True)
class Round:
    """The round in progress: what the free drafters drafted, how much of that pays, and what each drafter gains."""

    prices: Prices
    trials: dict[str, Trial] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)
    uncached: dict[str, int] = field(default_factory=dict)  # tokens that each paid drafter would have to read first
    paid: PaidDraft | None = None

    @property
    def best_trial(self) -> str | None:
        """The free drafter whose draft gains most; None if none gains anything."""
        best = max(self.trials, key=self.gains.__getitem__, default=None)
        return best if best is not None and self.gains[best] > 0 else None


class AutoController(Controller):
    """Decides drafter and draft length each round so that tokens per second are most and never below plain decoding's.

    It owns none of the drafters. `accounts`: of this sequence; `kinds`: what is known of the drafters, of which it may
    lack some. `clock` is there for simulations.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter], accounts: Accounts, kinds: Kinds, clock: Clock = perf_counter
    ) -> None:
        self.drafters = dict(drafters)
        self._accounts, self._kinds = accounts, kinds
        self.costs, self.bank = accounts.costs, accounts.bank
        self._clock = self._own_clock = clock
        self._states, self._paid = kinds.of("greedy"), list[DrafterState]()  # of this kind of text; of paid drafters
        self._unused = UnusedDrafts()
        self._round: Round | None = None
        self._asked, self._left_out = "", set[str]()  # who drafts; who failed and is left out until `begin`
        self._dropped = set[str]()  # who was closed
        self._predicted = self._came_true = 0  # tokens drafted from the caller's prediction of this answer; accepted
        self._context_ids: TokenIds = np.empty(0, np.int32)  # of the round in progress
        self._prompt_tokens = 0
        self._prompt_passes = 0.0  # plain passes that reading the prompt took
        self._is_new = True  # no round of this answer was decided yet

    @classmethod
    def of(
        cls,
        drafters: Mapping[str, Drafter],
        curve: CostCurve,
        costs: Mapping[str, DraftCost],
        share: float = 0.02,
        clock: Clock = perf_counter,
        threads: int = 1,
    ) -> Self:
        """The controller of a model's first sequence, which knows nothing of the drafters yet.

        `curve`: what the target's passes cost; `costs`: what each paid drafter's tokens cost; `share`: how much of
        plain decoding's time speculation may lose at most; `threads`: what costs were, or are to be, learnt with.
        """
        drafts = {name: costs.get(name) or DraftCost(is_once=drafter.costs_once) for name, drafter in drafters.items()}
        bank = TimeBank(c.DRAFTING_SHARE * share, c.START_PASSES * curve.at(1), is_guessed=True)
        return cls(drafters, Accounts(RunCosts(curve, drafts, threads), bank), Kinds(drafters), clock)

    def another(self, drafters: Mapping[str, Drafter]) -> Self:
        """One for another sequence, with rounds of its own; all else is shared. `drafters`: some of the same names."""
        return type(self)(drafters, Accounts(self.costs, self.bank), self._kinds, self._clock)

    def begin(self, prompt_ids: TokenIds, prefill_s: float = 0.0, clock: Clock | None = None) -> None:
        self._own_clock, self._prompt_tokens = clock or self._clock, prompt_ids.size
        for name, drafter in self.drafters.items():
            if name not in self._dropped:
                drafter.begin(prompt_ids)
        self._unused.clear()
        self._predicted = self._came_true = 0
        self._left_out &= self._dropped
        self._round = None
        self._accounts.begin(prefill_s)
        self._prompt_passes, self._is_new = prefill_s / self.costs.curve.at(1), True

    def use_threads(self, threads: int) -> None:
        self.costs.use_threads(threads)

    @property
    def shared_costs(self) -> RunCosts:
        return self.costs

    def share_passes(self, num_sequences: int, other_rows: int, prompt_rows: int) -> None:
        self.costs.share_passes(num_sequences, other_rows, prompt_rows)
        self.bank.at_load(num_sequences)

    def leave_out(self) -> str:
        self._left_out.add(self._asked)
        self._round = None
        return self._asked

    def drop(self, names: Collection[str]) -> None:
        self._dropped.update(names)
        self._left_out.update(names)

    # -- deciding

    def proposing(self, request: DraftRequest) -> Passes[Proposal]:
        costs = self.costs
        self._context_ids = request.token_ids
        costs.follow_threads()
        if self._is_new:  # a request tells the kind of the whole answer
            self._is_new = False
            self._states = self._kinds.of(kind_of(request, self._prompt_tokens))
            self._paid = [self._states[name] for name, drafter in self.drafters.items() if not drafter.is_free]
            self._allow(self._prompt_passes)
        if not costs.curve.is_sure_of_plain:
            return NOTHING  # all costs are relative to plain decoding's, so that is timed first
        prices = costs.prices()
        most = min(request.max_tokens, c.MAX_AUTO_LENGTH, costs.most_rows - 1)
        trusts = self._trusts_prediction(request)
        if most < 1 or not (trusts or self.bank.can_pay(prices.pass_s[2], prices.pass_s[1])):
            return NOTHING
        request = request.at_most(most)
        self._round = decided = self._expected(request, prices)
        chosen = max(decided.gains, key=decided.gains.__getitem__, default=None)
        if trusts and chosen == PREDICTION and decided.gains[chosen] > 0:
            trial = decided.trials[PREDICTION]
            return trial.proposal(PREDICTION, trial.length)
        chosen = self._due(decided, most) or (chosen if chosen is not None and decided.gains[chosen] > 0 else None)
        if chosen is None:
            return NOTHING
        if chosen in decided.trials:
            return self._affordable(decided, chosen)
        return (yield from self._paid_proposal(decided, chosen, request))

    def _trusts_prediction(self, request: DraftRequest) -> bool:
        """Whether a caller predicts the answer, and most of it came true: he asks for drafts that the bank may lose."""
        return request.predicted_ids is not None and 2 * self._came_true >= self._predicted

    def _expected(self, request: DraftRequest, prices: Prices) -> Round:
        """What each drafter is expected to gain: free ones draft, of paid ones it is known from earlier drafts."""
        found = Round(prices)
        for name, drafter in self.drafters.items():
            if name in self._left_out or not drafter.serves(request):
                continue
            self._asked = name
            if not drafter.is_free:
                self._consider(found, name, request)
                continue
            state, asked = self._states[name], list[float]()
            trial = request._replace(should_continue=while_it_may_pay(state.calibrator.predictor(), prices, asked))
            draft = request.sampler.permitted(drafter.draft(trial), request.token_ids)
            if draft.num_tokens:
                confidences = state.confidences(draft, asked)
                length, found.gains[name] = best_length(confidences, prices, draft.num_tokens)
                found.trials[name] = Trial(draft, confidences, length)
        return found

    def _consider(self, found: Round, name: str, request: DraftRequest) -> None:
        """What a paid drafter would have to read, and what it is expected to gain if it may be asked."""
        drafter, state, cost, prices = self.drafters[name], self._states[name], self.costs.draft(name), found.prices
        allowed_s = state.allowed / prices.rate
        most_s = min(allowed_s, self.bank.balance_s)
        if drafter.reads_part:  # the rest is read where what it gains anyway pays for it
            most_s = min(most_s, state.gain * c.READING_ROUNDS / prices.rate)
        num_uncached = to_read(drafter, request.token_ids, cost, prices, most_s)
        found.uncached[name] = num_uncached
        if cost.of(1, num_uncached) <= allowed_s:
            found.gains[name] = self._gain(state, cost, num_uncached, prices, request.max_tokens)

    def _gain(self, state: DrafterState, cost: DraftCost, num_uncached: int, prices: Prices, most: int) -> float:
        """Tokens expected to be gained by asking a paid drafter; what it must read first is spread over rounds."""
        if not self.bank.can_pay(prices.pass_s[2] + cost.of(1, num_uncached), prices.pass_s[1]):
            return 0.0
        if not state.times_asked:
            usual = [c.USUAL_CONFIDENCE] * min(most, c.PROBE_EVERY)
            gain = best_length(usual, prices, most, cost.next_s)[1]
            state.gain = max(gain - prices.rate * cost.once_s, 0.0)
        return state.gain - prices.rate * num_uncached * cost.read_s / min(c.READING_ROUNDS, most)

    def _due(self, decided: Round, most: int) -> str | None:
        """A paid drafter that is due for a probe, and that can gain anything; one that is not allowed to waits."""
        for name in decided.uncached:
            self._states[name].probe_in -= 1
        for name in decided.uncached:
            cost, certain = self.costs.draft(name), [1.0] * c.MAX_AUTO_LENGTH
            if self._states[name].probe_in < 0 and name in decided.gains:
                gain = best_length(certain, decided.prices, most, cost.next_s)[1] - decided.prices.rate * cost.once_s
                if gain > 0:
                    self._states[name].probe_in = c.PROBE_EVERY  # other sequences need not try it in the same round
                    return name
        return None

    def _affordable(self, decided: Round, name: str, spent_s: float = 0.0) -> Proposal:
        """The part of a free drafter's draft that pays and that the bank can afford after `spent_s` of the round."""
        pass_s, trial = decided.prices.pass_s, decided.trials[name]
        return trial.proposal(
            name, self.bank.longest(trial.length, lambda count: pass_s[count + 1] + spent_s, pass_s[1])
        )

    def _paid_proposal(self, decided: Round, name: str, request: DraftRequest) -> Passes[Proposal]:
        """A paid drafter's draft, as far as it pays, or a free one's that is expected to gain more."""
        self._asked = name
        pass_s, cost, num_uncached = decided.prices.pass_s, self.costs.draft(name), decided.uncached[name]
        allowed_s = self._states[name].allowed / decided.prices.rate - num_uncached * cost.read_s
        most = int(min(request.max_tokens, max(allowed_s / cost.next_s, 1) if cost.next_s else math.inf))
        most = self.bank.longest(most, lambda count: pass_s[count + 1] + cost.of(count, num_uncached), pass_s[1])
        free = decided.best_trial
        if not most:
            return NOTHING if free is None else self._affordable(decided, free)
        decided.paid = paid = yield from self._drafted(decided, name, request, most)
        if paid.draft.distributions is not None:
            # Under the rejection rule a sampled token is not dropped for what it is.
            paid.length = paid.draft.num_tokens
        elif free is not None and decided.gains[free] > paid.gain:
            return self._affordable(decided, free, paid.seconds)
        return Proposal(paid.draft.first(paid.length, list(paid.confidences)), name) if paid.length else NOTHING

    def _drafted(self, decided: Round, name: str, request: DraftRequest, most: int) -> Passes[PaidDraft]:
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
        return PaidDraft(name, cost, decided.uncached[name], draft, confidences, length, gain, seconds)

    # -- learning

    def observe(self, proposal: Proposal, verdict: Verdict, record: RoundRecord) -> None:
        started_s = self._clock()
        if proposal.drafter == PREDICTION:
            self._predicted += record.drafted_tokens
            self._came_true += record.accepted_tokens
        decided, self._round = self._round, None
        paid = None if decided is None else decided.paid
        plain_s, is_plain = self.costs.plain_s(), proposal.drafter is None
        expected_s = 0.0 if paid is None else paid.expected_s
        work_s, pass_s = self._accounts.charge(record, plain_s, is_plain=is_plain, expected_s=expected_s)
        if paid is not None and decided is not None:
            self._learn_paid(paid, decided, is_disturbed=record.is_disturbed)
            self._account(paid, decided, proposal, record.accepted_tokens, pass_s - plain_s)
        self._allow(record.accepted_tokens + 1)
        self.costs.earned(record.accepted_tokens + 1, work_s + pass_s - (0.0 if paid is None else paid.reading_s))
        if proposal.drafter is not None:
            self.drafters[proposal.drafter].observe(proposal.draft, verdict)
            self._states[proposal.drafter].learn_verdict(proposal.draft, verdict)
        if decided is not None:
            self._learn_unused(decided, proposal, verdict, record.position)
        self._accounts.learning_s = self._clock() - started_s

    def _learn_paid(self, paid: PaidDraft, decided: Round, *, is_disturbed: bool) -> None:
        """A paid drafter's cost and gain, from its draft."""
        if not is_disturbed:
            paid.cost.observe(paid.draft.num_tokens, paid.num_uncached, paid.seconds)
        net = paid.gain - decided.prices.rate * paid.cost.of(paid.draft.num_tokens, 0)
        is_priced = self.costs.curve.is_sure_of_rows
        self._states[paid.drafter].asked(net if is_priced else None)

    def _allow(self, num_tokens: float) -> None:
        """The bank's share of what plain decoding does in `num_tokens` passes may be lost on each paid drafter."""
        for state in self._paid:
            state.allow(self.bank.share * num_tokens)

    def _account(self, paid: PaidDraft, decided: Round, proposal: Proposal, accepted: int, rows_s: float) -> None:
        """What the round gained by its paid draft, over the best free one; a stall is not the drafter's.

        `rows_s`: seconds that the pass took longer than a plain one.
        """
        rate, free = decided.prices.rate, decided.best_trial
        gained = -rate * min(paid.seconds, c.LATE * paid.expected_s)
        if proposal.drafter == paid.drafter:
            gained += accepted - rate * rows_s - (0.0 if free is None else decided.gains[free])
        self._states[paid.drafter].allow(gained)

    def _learn_unused(self, decided: Round, proposal: Proposal, verdict: Verdict, start: int) -> None:
        """Keep the drafts that were not verified, and learn from those that the text decides by now."""
        for name, trial in decided.trials.items():
            if name != proposal.drafter:
                self._unused.add(name, start, trial.draft)
        paid = decided.paid
        if paid is not None and paid.drafter != proposal.drafter and paid.draft.distributions is None:
            self._unused.add(paid.drafter, start, paid.draft.main_chain)
        new_ids = *proposal.draft.token_ids[list(verdict.accepted_nodes)].tolist(), verdict.next_token_id
        for name, draft, agreed in self._unused.resolved(self._context_ids, new_ids):
            self._states[name].learn(draft, agreed)

    # -- kept between runs

    def to_json(self) -> dict[str, Any]:
        """What was learnt of the drafters, for the next run."""
        return {"kinds": self._kinds.to_json()}

    def restore(self, kept: Any) -> None:
        """Continue from what `to_json` returned; what does not fit is ignored."""
        if isinstance(kept, dict):
            self._kinds.restore(kept.get("kinds"))


def to_read(drafter: Drafter, token_ids: TokenIds, cost: DraftCost, prices: Prices, allowed_s: float) -> int:
    """Tokens that a paid drafter has to read first: all that it lacks, or as many as `allowed_s` seconds may pay for.

    What it drafts from a part of a long text is verified as any draft is, so trying it costs little.
    """
    if not cost.read_s:
        return drafter.num_uncached(token_ids)
    allowed_s = max(allowed_s, 0.0)
    is_long = token_ids.size * cost.read_s > c.LONG_READING * prices.pass_s[1]
    part_s = c.PART_READING * allowed_s if is_long else 0.0
    return drafter.reading(token_ids, int(allowed_s / cost.read_s), int(part_s / cost.read_s))

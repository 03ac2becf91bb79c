"""The automatic controller: measured costs, calibrated confidence, the rate rule, a choice among drafters, a time bank.

One round: free drafters draft on trial, paid ones are forecast; each has a best length and an expected gain over plain
decoding (`length`); Hedge chooses one or none (`choice`); a free draft replaces a paid one that turns out to be
expected to gain less; the bank limits the length (`bank`). After the round costs, confidences and weights are updated
from its outcome, and from unused drafts as soon as the text shows whether they were right (`round`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from time import perf_counter
from typing import Any, Self

import numpy as np

from edgespec.control import constants as c
from edgespec.control.accounts import Accounts
from edgespec.control.bank import TimeBank
from edgespec.control.base import NOTHING, Clock, Controller, Proposal
from edgespec.control.choice import BEST, add_ucb_bonus, choice_of
from edgespec.control.cost import CostCurve
from edgespec.control.draft_cost import DraftCost, RoundCost
from edgespec.control.kinds import Kinds, kind_of
from edgespec.control.length import Prices, best_length, ceiling, forecast, while_it_may_pay
from edgespec.control.round import PaidRound, Round, UnusedDraft, UnusedDrafts, to_read
from edgespec.control.run_cost import RunCosts
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.predicted import PREDICTION
from edgespec.engines.sequence import Passes
from edgespec.reports import RoundRecord
from edgespec.types import TokenIds, Verdict


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
        self._clock = self._own_clock = clock
        self._kind = kinds.of("greedy")
        self._unused = UnusedDrafts()
        self._round: Round | None = None
        self._asked, self._left_out = "", set[str]()  # who drafts; who failed and is left out until `begin`
        self._dropped = set[str]()  # who was closed
        self._rest = 0  # rounds before the next decision: where a pass takes a millisecond, deciding is not free
        self._rested = 0  # plain rounds since the last one that was decided
        self._has_begun = False  # with this text's kind
        self._has_decided = False  # since the prompt: the first decision also reads that
        self._is_short = False  # it rests because the bank could pay for no draft
        self._predicted = self._came_true = 0  # tokens drafted from the caller's prediction of this answer; accepted
        self._context_ids: TokenIds = np.empty(0, np.int32)  # of the round in progress
        self._prompt_tokens = 0

    @property
    def costs(self) -> RunCosts:
        return self._accounts.costs

    @property
    def bank(self) -> TimeBank:
        return self._accounts.bank

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
        plain decoding's time speculation may lose at most; `threads`: what costs were, or are to be, measured with.
        """
        drafts = {name: costs.get(name) or DraftCost(is_once=drafter.costs_once) for name, drafter in drafters.items()}
        bank = TimeBank(c.DRAFTING_SHARE * share, c.START_PASSES * curve.at(1), is_guessed=not curve.is_scaled)
        return cls(drafters, Accounts(RunCosts(curve, drafts, threads), bank), Kinds(drafters), clock)

    def another(self, drafters: Mapping[str, Drafter]) -> Self:
        """One for another sequence, with rounds of its own; all else is shared. `drafters`: some of the same names."""
        return type(self)(drafters, Accounts(self.costs, self.bank), self._kinds, self._clock)

    def begin(
        self, prompt_ids: TokenIds, prefill_s: float = 0.0, clock: Clock | None = None, num_read: int = 0
    ) -> None:
        self._own_clock, self._prompt_tokens = clock or self._clock, prompt_ids.size
        for name, drafter in self.drafters.items():
            if name not in self._dropped:
                drafter.begin(prompt_ids)
        self._unused.clear()
        self._predicted = self._came_true = 0
        self._left_out &= self._dropped
        self._count_rested(self._context_ids.size)  # the end of the last answer cut a rest short
        self._round, self._rest, self._has_begun, self._has_decided = None, 0, False, False
        self._accounts.begin(prompt_ids.size, prefill_s)
        self.costs.read_prompt(num_read, prefill_s)

    def use_threads(self, threads: int) -> None:
        self.costs.use_threads(threads)

    @property
    def shared_costs(self) -> RunCosts:
        return self.costs

    def share_passes(self, num_sequences: int, other_rows: int, prompt_rows: int) -> None:
        self.costs.share_passes(num_sequences, other_rows, prompt_rows)
        self.bank.at_load(num_sequences)

    def rest(self) -> int:
        self._rested, self._rest = self._rest, 0
        return self._rested

    @property
    def wakes(self) -> bool:
        return not self._is_short

    def wake(self, num_left: int) -> None:
        self._rested -= num_left

    def proposing(self, request: DraftRequest) -> Passes[Proposal]:
        context = request.token_ids.size
        self._context_ids = request.token_ids
        self._count_rested(context)
        self.costs.follow_threads()
        self._follow_kind(request)
        prices = self.costs.prices(context)
        most = min(request.max_tokens, c.MAX_AUTO_LENGTH, self.costs.most_rows - 1)
        if not self.costs.curve.is_sure_of_plain():
            return NOTHING  # all costs are relative to plain decoding's, so that is timed first
        least_s, plain_s = prices.pass_s[2], prices.pass_s[1]
        self._is_short = not self.bank.can_pay(least_s, plain_s)
        if most < 1 or (self._is_short and not self._trusts_prediction(request)):
            # The bank cannot pay for any draft, so no time is spent on deciding until it can.
            self._rest = min(self.bank.rounds_until(least_s, plain_s), c.LONGEST_REST)
            return NOTHING
        request = request.at_most(most)
        decided = self._expected(request, prices)
        decided.is_refresh = self._accounts.is_refresh_due
        trusts = self._trusts_prediction(request) and choice_of(BEST, decided.gains) == PREDICTION
        decided.chosen = None if decided.is_refresh else PREDICTION if trusts else self._chosen(decided, most)
        self._round = decided
        if decided.chosen is None:
            return NOTHING
        if decided.chosen in decided.trials:
            if trusts:
                return self._kept(decided, PREDICTION, decided.lengths[PREDICTION])
            return self._affordable(decided, decided.chosen)
        return (yield from self._paid_proposal(decided, decided.chosen, request))

    def leave_out(self) -> str:
        self._left_out.add(self._asked)
        self._round = None
        return self._asked

    def drop(self, names: Collection[str]) -> None:
        self._dropped.update(names)
        self._left_out.update(names)

    def observe(self, proposal: Proposal, verdict: Verdict, record: RoundRecord) -> None:
        started_s = self._clock()
        if proposal.drafter == PREDICTION:
            self._predicted += record.drafted_tokens
            self._came_true += record.accepted_tokens
        self._learn(proposal, verdict, record)
        new_ids = *proposal.draft.token_ids[list(verdict.accepted_nodes)].tolist(), verdict.next_token_id
        self._kind.learn_unused(self._unused, np.append(self._context_ids, np.array(new_ids, np.int32)))
        self.costs.prices(record.position + record.accepted_tokens + 1)  # made now, so that the next decision is quick
        self._accounts.learning_s = self._clock() - started_s

    # -- deciding

    def _trusts_prediction(self, request: DraftRequest) -> bool:
        """Whether a caller predicts the answer, and most of it came true: he asks for drafts that the bank may lose."""
        return request.predicted_ids is not None and 2 * self._came_true >= self._predicted

    def _count_rested(self, context: int) -> None:
        """Account for the rounds since the last decision."""
        if self._rested:
            self._accounts.rested(self._rested, context)
            self._kind.rested(self._rested)
            self._rested = 0

    def _follow_kind(self, request: DraftRequest) -> None:
        """Use what was learnt of texts of this kind."""
        self._kind = self._kinds.of(kind_of(request, self._prompt_tokens))
        if not self._has_begun:
            self._has_begun = True
            self._kind.begin()

    def _expected(self, request: DraftRequest, prices: Prices) -> Round:
        """What each drafter is expected to gain: free ones draft on trial, paid ones are forecast."""
        found = Round(prices, {}, {}, {}, {})
        for name, drafter in self.drafters.items():
            if name in self._left_out or not drafter.serves(request):
                continue
            self._asked = name
            if drafter.is_free:
                state = self._kind.states[name]
                trial = request._replace(should_continue=while_it_may_pay(state.calibrator.predictor(), prices))
                found.trials[name] = draft = request.sampler.permitted(drafter.draft(trial), request.token_ids)
                confidences = state.confidences(draft) if draft.num_tokens else ()
                found.lengths[name], found.gains[name] = best_length(confidences, prices, draft.num_tokens)
            else:
                cost, state = self.costs.draft(name), self._kind.states[name]
                num_uncached = to_read(drafter, request.token_ids, cost, state, prices, self.bank.balance_s)
                found.uncached[name] = num_uncached
                found.gains[name] = self._forecast(name, num_uncached, prices, request.max_tokens)
        if len(found.uncached) > 1:
            add_ucb_bonus(found.gains, {name: self._kind.states[name].ucb_bonus for name in found.uncached})
        return found

    def _forecast(self, name: str, num_uncached: int, prices: Prices, most: int) -> float:
        """Tokens expected to be gained by asking a paid drafter; what it must read first is spread over rounds.

        Not the gain at the expected confidences: whether to verify is decided when they are known, so that the gain of
        asking is larger on average.
        """
        cost, state = self.costs.draft(name), self._kind.states[name]
        if not self.bank.can_pay(prices.pass_s[2] + cost.of(1, num_uncached), prices.pass_s[1]):
            return 0.0
        if not state.gain.is_known:
            ahead = state.upcoming.chain(None, min(most, c.FORESIGHT))
            gain = forecast(0, 1.0, ahead, prices, cost.next_s, most)[1]
            state.gain.value = max(gain - prices.rate * cost.once_s, 0.0)
        return state.score - prices.rate * num_uncached * cost.read_s / min(c.READING_ROUNDS, most)

    def _chosen(self, decided: Round, most: int) -> str | None:
        """The round's drafter: one that was hardly tried, what Hedge takes, or a probe that is due.

        First trials come first: lookups that claim a little in each round would otherwise keep a draft model from ever
        showing what it gains.
        """
        first = self._probe(decided, most, first=True)
        return first or self._kind.hedge.pick(decided.gains) or self._probe(decided, most, first=False)

    def _probe(self, decided: Round, most: int, *, first: bool) -> str | None:
        """A paid drafter that is due for a trial, one of its `first` or a later one, which the bank can pay.

        One whose reading is too dear now leaves the round to the next: waiting with it saves nothing for it, since
        other drafts are paid from the same bank.
        """
        pass_s, share = decided.prices.pass_s, c.FIRST_READING if first else c.PROBE_READING
        for name, state in self._kind.states.items():
            if name in decided.uncached and state.probe_in <= 0 and first == (state.times_asked < c.FIRST_TRIALS):
                cost = self.costs.draft(name)
                may_pay = ceiling(pass_s, cost.next_s, most, cost.once_s)[1] >= c.PROBE_CEILING
                if may_pay and decided.uncached[name] * cost.read_s <= share * self.bank.balance_s:
                    return name
        return None

    def _affordable(self, decided: Round, name: str, spent_s: float = 0.0) -> Proposal:
        """The part of a free drafter's draft that pays and that the bank can afford after `spent_s` of the round."""
        pass_s = decided.prices.pass_s
        length = self.bank.longest(decided.lengths[name], lambda count: pass_s[count + 1] + spent_s, pass_s[1])
        return self._kept(decided, name, length)

    def _kept(self, decided: Round, name: str, length: int) -> Proposal:
        """The first `length` tokens of a free drafter's draft."""
        draft = decided.trials[name]
        confidences = list(islice(self._kind.states[name].confidences(draft), length))
        return Proposal(draft.first(length, confidences), name) if length else NOTHING

    def _paid_proposal(self, decided: Round, name: str, request: DraftRequest) -> Passes[Proposal]:
        """A paid drafter's draft, as far as it pays, or a free one's that is expected to gain more."""
        self._asked = name
        asked = PaidRound(
            self.drafters[name], self._kind.states[name], self.costs.draft(name), decided.prices, decided.uncached[name]
        )
        if not (most := asked.affordable(request.max_tokens, self.bank)):
            return NOTHING
        decided.paid = asked
        draft, confidences, length = yield from asked.drafting(request, most, self._own_clock)
        if draft.distributions is not None:
            length = draft.num_tokens  # under the rejection rule a sampled token may not be dropped for what it is
        else:
            free_gains = {free: decided.gains[free] for free in decided.trials}
            if max(free_gains.values(), default=0.0) > asked.gain:
                second = self._kind.hedge.second(free_gains)
                if second is not None:
                    return self._affordable(decided, second, asked.seconds)
        return Proposal(draft.first(length, confidences), name) if length else NOTHING

    # -- learning

    def _learn(self, proposal: Proposal, verdict: Verdict, record: RoundRecord) -> None:
        plain_s = self.costs.plain_s(record.position)
        num_tokens, rate = record.accepted_tokens + 1, self.costs.rate(plain_s)
        decided, self._round = self._round, None
        is_plain = proposal.drafter is None
        expected_s = decided.paid.expected_s if decided is not None and decided.paid is not None else 0.0
        work_s, pass_s = self._accounts.charge(record, plain_s, is_plain=is_plain, expected_s=expected_s)
        if decided is not None:
            self._learn_drafts(decided, proposal.drafter, record, rate)
        self._accounts.learn_pass(record, plain_s, is_plain=is_plain)
        reading_s = 0.0 if decided is None else decided.reading_s
        self.costs.earned(num_tokens, work_s + pass_s - reading_s)
        if decided is None:
            return
        if proposal.drafter is not None:
            self.drafters[proposal.drafter].observe(proposal.draft, verdict)
            self._kind.states[proposal.drafter].learn_verdict(proposal.draft, verdict)
            gained = num_tokens - 1 - rate * (work_s + pass_s - reading_s - plain_s)
        else:
            gained = -rate * (work_s - reading_s)  # drafted, and a wider pass would not have paid
        if self._has_decided:
            self._kind.score.observe(gained)
            if is_plain and decided.paid is None and not decided.is_refresh and not self._kind.score.pays:
                self._rest = self._accounts.rounds_to_earn(work_s, plain_s)
        self._has_decided = True
        self._kind.hedge.update(decided.gains, decided.net_tokens(proposal.drafter, gained, rate))
        self._kind.hedge.share()
        self._kind.count_probes(decided, self.drafters)

    def _learn_drafts(self, decided: Round, used: str | None, record: RoundRecord, rate: float) -> None:
        """Learn each drafter's costs and confidences; drafts that were not verified wait for the text."""
        pass_s, context = decided.prices.pass_s, record.position
        for name, draft in decided.trials.items():
            if name != used:
                length = decided.lengths[name]
                extra = rate * (pass_s[length + 1] - pass_s[1])
                self._unused.add(UnusedDraft(name, context, draft, length, decided.gains, extra))
        if decided.chosen is not None and decided.paid is not None and decided.paid.draft is not None:
            is_priced = self.costs.curve.is_sure_of_rows
            decided.paid.learn(is_disturbed=record.is_disturbed, is_priced=is_priced)
            if used != decided.chosen and decided.paid.draft.distributions is None:
                chain = decided.paid.draft.main_chain
                self._unused.add(UnusedDraft(decided.chosen, context, chain, 0, decided.gains, 0.0))

    # -- kept between runs

    def to_json(self) -> dict[str, Any]:
        """What was learnt of the drafters and of a round's own work, for the next run."""
        return {"kinds": self._kinds.to_json(), "round": self.costs.round.to_json()}

    def restore(self, kept: Any) -> None:
        """Continue from what `to_json` returned; what does not fit is ignored."""
        if isinstance(kept, dict):
            self._kinds.restore(kept.get("kinds"))
            self.costs.round = RoundCost.from_json(kept.get("round"))

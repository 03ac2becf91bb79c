"""The automatic controller: measured costs, calibrated confidence, the rate rule, a choice among drafters, a time bank.

One round: free drafters draft on trial, paid ones are forecast; each has a best length and an expected gain over plain
decoding (`length`); Hedge takes one or none (`choice`); what a paid one has drafted gives way to a free draft that is
worth more; the bank has the last word (`bank`). Afterwards costs, confidences and weights learn from what happened, and
unused drafts from the text itself (`shadow`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.control.bank import LATE, TimeBank
from edgespec.control.base import NOTHING, Controller, Proposal
from edgespec.control.choice import add_ucb_bonus
from edgespec.control.cost import WIDEST, CostCurve, DraftCost, RoundCost
from edgespec.control.kinds import Kinds, kind_of
from edgespec.control.length import FORESIGHT, best_length, ceiling, forecast, least_ahead
from edgespec.control.round import PaidRound, Round
from edgespec.control.shadow import Shadow, Shadows
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import Draft, RoundRecord, TokenIds, Verdict

MAX_AUTO_LENGTH = 32
START_PASSES = 4.0  # what the bank holds at first, in plain passes: a first draft that fails must not be the last
MOST_PASSES = 6.0  # the most it may hold when a generation begins
_KEPT_PASSES = 12.0  # the most of what was gained beyond that, that later generations may still lose
_RATE_MEMORY = 0.95  # per round, of the running rate
_READING_ROUNDS = 16  # rounds over which the reading of what a paid drafter lacks is spread
_PROBE_READING = 0.25  # of what the bank holds, that a probe may spend on reading first
_REFRESH_FIRST, _REFRESH_EVERY = 16, 128  # rounds of speculation after which one plain pass is timed again, doubling
_COUNTED = 0.6  # of the share that may be lost, what drafts may cost; the rest is for what a round adds besides
_DECIDING = 0.25  # of the share that may be lost, that deciding not to draft may take
_LONGEST_REST = 64  # rounds
_WORTH_PROBING = 1.02  # a drafter whose ceiling is below this speedup can gain nothing here


class AutoController(Controller):
    """Decides drafter and draft length each round so that tokens per second are most and never below plain decoding's.

    `curve`: what the target's passes cost; `costs`: what each paid drafter's tokens cost; `share`: how much of plain
    decoding's time speculation may lose at most. It owns none of the drafters. `clock` is there for simulations.
    `threads`: what these costs were, or are to be, measured with.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        curve: CostCurve,
        costs: Mapping[str, DraftCost],
        share: float = 0.02,
        clock: Callable[[], float] = perf_counter,
        threads: int = 1,
    ) -> None:
        self.drafters = dict(drafters)
        self.curve = curve
        self.costs = {name: costs.get(name) or DraftCost() for name in drafters}
        self.round_cost = RoundCost()
        self.bank = TimeBank(_COUNTED * share, START_PASSES * curve.at(1))
        self._clock = clock
        self._kinds = Kinds(self.drafters)
        self._states, self._hedge = self._kinds.of("greedy")
        self._shadows = Shadows()
        self._round: Round | None = None
        self._asked, self._left_out = "", set[str]()  # who drafts; who failed and is left out until `begin`
        self._tokens, self._seconds = 0.0, 0.0  # of recent rounds, older ones fading
        self._since_plain, self._refresh_after = 0, _REFRESH_FIRST
        self._rest = 0  # rounds before it is decided again: where a pass takes a millisecond, deciding is not free
        self._rested = 0  # plain rounds since the last one that was decided
        self._prefill_s = 0.0
        self._context_ids: TokenIds = np.empty(0, np.int32)  # of the round in progress
        self._learning_s = 0.0  # that the last `observe` took
        self._pass_s: tuple[list[float], float, list[float]] = [], 0.0, []  # a table, what was added to it, the sum
        self._ahead_s: list[float] = []  # what a further row of these passes takes at least
        self._known: dict[int, tuple[CostCurve, dict[str, DraftCost]]] = {}  # what passes and drafts cost, by threads
        self._threads = self._next_threads = threads  # that the costs in use are of; that the next round is of

    def begin(self, prompt_ids: TokenIds, prefill_s: float = 0.0) -> None:
        for drafter in self.drafters.values():
            drafter.begin(prompt_ids)
        self._shadows.clear()
        self._left_out.clear()
        self._round, self._rest, self._rested = None, 0, 0
        self._prefill_s = prefill_s
        self._open_bank(self.curve.at(1, prompt_ids.size))

    def _open_bank(self, plain_s: float) -> None:
        self.bank.open(START_PASSES * plain_s, MOST_PASSES * plain_s, _KEPT_PASSES * plain_s)
        self.bank.waited(self._prefill_s)  # what lets a draft model read a long prompt

    def _observe_pass(self, record: RoundRecord) -> None:
        """Learn what the pass cost; the first plain ones of a first run say what all that was guessed is in seconds."""
        was_guessed = not self.curve.is_scaled
        self.curve.observe(record.width, record.position, record.verify_s)
        if was_guessed and self.curve.is_scaled:
            plain_s = self.curve.at(1, record.position)
            for cost in self.costs.values():
                cost.scale(plain_s)
            self.bank = TimeBank(self.bank.share, START_PASSES * plain_s)
            self._open_bank(plain_s)

    def use_threads(self, threads: int) -> None:
        """As the contract says, from the next round on: the last one may still have to be learnt from."""
        self._next_threads = threads

    def _follow_threads(self) -> None:
        """What is not known of a number of threads is taken for what it cost before, until passes say otherwise."""
        threads = self._next_threads
        self._known[self._threads] = self.curve, self.costs
        if not self.curve.is_scaled:
            self._known[threads] = self.curve, self.costs  # a guess is as good for this number as for another
        elif threads not in self._known:
            likewise = {name: DraftCost(cost.token_s, cost.read_s) for name, cost in self.costs.items()}
            self._known[threads] = CostCurve(self.curve.refined(), self.curve.context), likewise
        self._threads, (self.curve, self.costs) = threads, self._known[threads]
        self._pass_s = [], 0.0, []

    def rest(self) -> int:
        self._rested, self._rest = self._rest, 0
        return self._rested

    def propose(self, request: DraftRequest) -> Proposal:
        context = request.token_ids.size
        self._context_ids = request.token_ids
        if self._rested:
            self.bank.decoded(self._rested * self.curve.at(1, context), 0.0)
            self._rested = self._since_plain = 0
        if self._next_threads != self._threads:
            self._follow_threads()
        self._states, self._hedge = self._kinds.of(kind_of(request))
        pass_s = self._round_table(context)
        most = min(request.max_tokens, MAX_AUTO_LENGTH, WIDEST - 1)
        if not self.curve.is_sure_of_plain():
            return NOTHING  # what plain decoding takes is the measure of all: it is looked at before anything is risked
        if most < 1 or not self.bank.can_pay(pass_s[2], pass_s[1]):
            # Nothing could be afforded, so nothing is spent on deciding either, until something can be.
            self._rest = min(self.bank.rounds_until(pass_s[2], pass_s[1]), _LONGEST_REST)
            return NOTHING
        rate, request = self._rate(pass_s[1]), request.at_most(most)
        drafts: dict[str, Draft] = {}
        lengths: dict[str, int] = {}
        gains: dict[str, float] = {}
        uncached: dict[str, int] = {}
        for name, drafter in self.drafters.items():
            if name in self._left_out:
                continue
            self._asked = name
            if drafter.is_free:
                drafts[name] = draft = drafter.draft(request)
                lengths[name], gains[name] = self._worth(name, draft, pass_s, rate)
            else:
                uncached[name] = num_uncached = drafter.num_uncached(request.token_ids)
                gains[name] = self._forecast(name, num_uncached, pass_s, rate, most)
        if len(uncached) > 1:
            add_ucb_bonus(gains, {name: self._states[name].ucb_bonus for name in uncached})
        is_refresh = self._since_plain >= self._refresh_after
        chosen = None if is_refresh else self._chosen(gains, uncached, pass_s, most)
        self._round = Round(drafts, lengths, gains, chosen, is_refresh)
        if is_refresh:
            self._refresh_after = min(2 * self._refresh_after, _REFRESH_EVERY)
        if chosen is None:
            return NOTHING
        if chosen in drafts:
            return self._affordable(chosen, pass_s)
        return self._paid_proposal(chosen, uncached[chosen], request, pass_s, rate)

    def leave_out(self) -> str:
        self._left_out.add(self._asked)
        self._round = None
        return self._asked

    def observe(self, proposal: Proposal, verdict: Verdict, record: RoundRecord) -> None:
        started_s = self._clock()
        self._learn(proposal, verdict, record)
        self._judge_shadows(proposal.draft.token_ids[list(verdict.accepted_nodes)], verdict.next_token_id)
        self._round_table(record.position + record.accepted_tokens + 1)  # for the next decision, which has to be quick
        self._learning_s = self._clock() - started_s

    def _learn(self, proposal: Proposal, verdict: Verdict, record: RoundRecord) -> None:
        plain_s = self.curve.at(1, record.position)
        num_tokens, rate = record.accepted_tokens + 1, self._rate(plain_s)
        decided, self._round = self._round, None
        work_s, pass_s = self._account(proposal, record, decided, plain_s)
        if decided is not None:
            self._learn_drafts(decided, proposal.drafter, record, rate)
        if not (record.is_disturbed and self.curve.is_scaled):
            self._observe_pass(record)
        reading_s = 0.0 if decided is None else decided.reading_s
        self._tokens = _RATE_MEMORY * self._tokens + num_tokens
        self._seconds = _RATE_MEMORY * self._seconds + work_s + pass_s - reading_s
        if decided is None:
            return
        if proposal.drafter is not None:
            self.drafters[proposal.drafter].observe(proposal.draft, verdict)
            self._states[proposal.drafter].learn_verdict(proposal.draft, verdict)
            gained = num_tokens - 1 - rate * (work_s + pass_s - reading_s - plain_s)
        else:
            gained = -rate * (work_s - reading_s)  # drafted, and not worth a wider pass
        self._hedge.update(decided.gains, decided.net_tokens(proposal.drafter, gained, rate))
        self._hedge.share()
        self._count_probes(decided)

    def _account(
        self, proposal: Proposal, record: RoundRecord, decided: Round | None, plain_s: float
    ) -> tuple[float, float]:
        """Credit and charge the bank; seconds of (our own work, the pass), without what the machine is to blame for."""
        expected_s = self._expected_s(decided)
        on_time_s = LATE * self.curve.at(record.width, record.position)
        if proposal.drafter is None:
            self._since_plain = 0
            self.round_cost.decoded(record.judge_s)
            work_s = self.bank.own_work(record.draft_s + self._learning_s, expected_s, plain_s)
            self.bank.decoded(plain_s, work_s)
            if decided is not None and decided.paid is None and not decided.is_refresh:
                affordable_s = _DECIDING * self.bank.share * plain_s
                self._rest = min(int(work_s / affordable_s), _LONGEST_REST) if affordable_s else 0
            return work_s, min(record.verify_s, on_time_s)
        self._since_plain += 1
        num_tokens = record.accepted_tokens + 1
        own_s = self.round_cost.speculated(num_tokens, record.judge_s + self._learning_s)
        work_s = self.bank.own_work(record.draft_s + own_s, expected_s + self.round_cost.round_s, plain_s)
        pass_s = min(record.verify_s, on_time_s)
        self.bank.speculated(num_tokens, work_s + pass_s, plain_s)
        return work_s, pass_s

    def _expected_s(self, decided: Round | None) -> float:
        """What the drafting of a round should have taken; infinite where nothing is known yet: it is believed then."""
        paid = None if decided is None else decided.paid
        return 0.0 if paid is None or paid.draft is None else paid.expected_s

    # -- deciding

    def _round_table(self, context: int) -> list[float]:
        """Seconds of a round by the width of its pass: of the pass and, if something is drafted, our own work."""
        table, round_s = self.curve.table(context), self.round_cost.round_s
        if self._pass_s[0] is not table:
            self._ahead_s = least_ahead(table[: MAX_AUTO_LENGTH + 2])
        if self._pass_s[0] is not table or self._pass_s[1] != round_s:
            self._pass_s = table, round_s, [*table[:2], *(seconds + round_s for seconds in table[2:])]
        return self._pass_s[2]

    def _rate(self, plain_s: float) -> float:
        """Tokens per second that this run earns; never less than plain decoding would."""
        return max(self._tokens / self._seconds if self._seconds else 0.0, 1.0 / plain_s)

    def _worth(self, name: str, draft: Draft, pass_s: list[float], rate: float) -> tuple[int, float]:
        """(tokens of a finished draft to verify, what that is expected to gain)."""
        if not draft.num_tokens:
            return 0, 0.0
        confidences = self._states[name].confidences(draft)
        return best_length(confidences, pass_s, self._ahead_s, rate, draft.num_tokens)

    def _forecast(self, name: str, num_uncached: int, pass_s: list[float], rate: float, most: int) -> float:
        """Tokens to gain from asking a paid drafter, as far as is known before; what it must read first is spread.

        Not the gain of the confidences to be expected: whether to verify is decided when they are known, and an option
        is worth more than what it is on average.
        """
        cost, state = self.costs[name], self._states[name]
        if not self.bank.can_pay(pass_s[2] + cost.of(1, num_uncached), pass_s[1]):
            return 0.0
        if state.expected_gain is None:
            ahead = state.upcoming.chain(None, min(most, FORESIGHT))
            state.expected_gain = forecast(0, 1.0, ahead, pass_s, self._ahead_s, cost.token_s, rate, most)[1]
        return state.score - rate * num_uncached * cost.read_s / min(_READING_ROUNDS, most)

    def _chosen(
        self, gains: Mapping[str, float], uncached: Mapping[str, int], pass_s: list[float], most: int
    ) -> str | None:
        """The round's drafter: what Hedge takes, or a probe that is due."""
        chosen = self._hedge.pick(gains)
        if chosen is not None:
            return chosen
        for name, state in self._states.items():
            if name in uncached and state.probe_in <= 0 and self._can_gain(name, pass_s, most):
                reading_s = uncached[name] * self.costs[name].read_s
                return name if reading_s <= _PROBE_READING * self.bank.balance_s else None
        return None

    def _can_gain(self, name: str, pass_s: list[float], most: int) -> bool:
        return ceiling(pass_s, self.costs[name].token_s, most)[1] >= _WORTH_PROBING

    def _affordable(self, name: str, pass_s: list[float], spent_s: float = 0.0) -> Proposal:
        """As much of a free drafter's draft as is worth it and the bank can pay, `spent_s` of the round being gone."""
        assert self._round is not None
        draft, length = self._round.trials[name], self._round.lengths[name]
        length = self.bank.longest(length, lambda count: pass_s[count + 1] + spent_s, pass_s[1])
        confidences = list(islice(self._states[name].confidences(draft), length))
        return Proposal(draft.first(length, confidences), name) if length else NOTHING

    def _paid_proposal(
        self, name: str, num_uncached: int, request: DraftRequest, pass_s: list[float], rate: float
    ) -> Proposal:
        """What a paid drafter drafts, as far as it is worth verifying, or a free one's draft that is worth more."""
        assert self._round is not None
        drafter, state, self._asked = self.drafters[name], self._states[name], name
        asked = PaidRound(
            drafter, state, self.costs[name], self.bank, self._clock, num_uncached, pass_s, self._ahead_s, rate
        )
        if not (most := asked.affordable(request.max_tokens)):
            return NOTHING
        self._round.paid = asked
        draft, confidences, length = asked.drafted(request, most)
        if draft.distributions is not None:
            length = draft.num_tokens  # under the rejection rule a sampled token may not be dropped for what it is
        else:
            free_gains = {free: self._round.gains[free] for free in self._round.trials}
            if max(free_gains.values(), default=0.0) > asked.gain:
                second = self._hedge.second(free_gains)
                if second is not None:
                    return self._affordable(second, pass_s, asked.seconds)
        return Proposal(draft.first(length, confidences), name) if length else NOTHING

    # -- learning

    def _learn_drafts(self, decided: Round, used: str | None, record: RoundRecord, rate: float) -> None:
        """What was drafted says what to expect of a drafter; what was not verified is left for the text to judge."""
        pass_s, context = self._pass_s[2], record.position
        for name, draft in decided.trials.items():
            if name != used:
                length = decided.lengths[name]
                extra = rate * (pass_s[length + 1] - pass_s[1])
                self._shadows.add(Shadow(name, context, draft, length, decided.gains, extra))
        if decided.chosen is not None and decided.paid is not None and decided.paid.draft is not None:
            decided.paid.learn(is_disturbed=record.is_disturbed)
            if used != decided.chosen and decided.paid.draft.distributions is None:
                self._shadows.add(Shadow(decided.chosen, context, decided.paid.draft.main_chain, 0, decided.gains, 0.0))

    def _judge_shadows(self, accepted_ids: TokenIds, next_id: int) -> None:
        told_ids = np.concatenate((self._context_ids, accepted_ids, np.array([next_id], np.int32)))
        for shadow, agreed in self._shadows.resolved(told_ids):
            self._states[shadow.drafter].learn(shadow.draft, agreed)
            if shadow.kept:
                net = min(agreed, shadow.kept) - shadow.cost_tokens
                self._hedge.update(shadow.gains, {shadow.drafter: net})

    def _count_probes(self, decided: Round) -> None:
        for name, state in self._states.items():
            if not self.drafters[name].is_free:
                expected = decided.gains.get(name, 0.0) > 0
                is_promising = decided.paid is not None and decided.paid.is_promising
                state.count_probe(asked=name == decided.chosen, expected=expected, promising=is_promising)

    # -- what is kept

    def state(self) -> dict[str, Any]:
        """What was learnt of the drafters and of a round's own work, as JSON."""
        return {"kinds": self._kinds.kept(), "round": self.round_cost.kept()}

    def restore(self, kept: Any) -> None:
        """Go on from what `state` gave; what does not fit is left out."""
        if isinstance(kept, dict):
            self._kinds.restore(kept.get("kinds"))
            self.round_cost = RoundCost.of(kept.get("round"))

"""Where the time of each round went: charges it to the time bank, and learns from it what passes cost.

A plain pass after a wider one may take longer than usual, and speculation is to blame. So this also remembers what the
previous pass was, and when a plain pass is due to be timed again.
"""

from __future__ import annotations

from edgespec.control import constants as c
from edgespec.control.bank import TimeBank
from edgespec.control.run_cost import RunCosts
from edgespec.reports import RoundRecord


class Accounts:
    """The accounts of one sequence; several may share `costs` (of passes and drafts) and `bank` (what may be lost)."""

    def __init__(self, costs: RunCosts, bank: TimeBank) -> None:
        self.costs, self.bank = costs, bank
        self.learning_s = 0.0  # time spent on learning from the last round
        self._since_plain, self._refresh_after = 0, c.REFRESH_FIRST
        self._before = ""  # the previous pass: "plain", "wide" (a round that speculated), or "" after the prompt
        self._prefill_s = 0.0

    def begin(self, num_tokens: int, prefill_s: float) -> None:
        """A generation begins after a prompt of `num_tokens`, which was read in `prefill_s`."""
        self._before, self._prefill_s = "", prefill_s
        self._open_bank(self.costs.curve.at(1, num_tokens))

    def _open_bank(self, plain_s: float) -> None:
        self.bank.open(c.START_PASSES * plain_s, c.MOST_PASSES * plain_s, c.KEPT_PASSES * plain_s)
        self.bank.waited(self._prefill_s)  # so that a draft model can read a long prompt

    def rested(self, num_rounds: int, context: int) -> None:
        """`num_rounds` plain rounds went by without a decision."""
        self.bank.decoded(num_rounds * self.costs.plain_s(context), 0.0)
        self._since_plain, self._before = 0, "plain"

    @property
    def is_refresh_due(self) -> bool:
        """Whether enough rounds have speculated that a plain pass has to be timed again."""
        return self._since_plain >= self._refresh_after

    def rounds_to_earn(self, work_s: float, plain_s: float) -> int:
        """Plain rounds until deciding, which took `work_s`, has cost no more than its share of them."""
        affordable_s = c.DECIDING_SHARE * self.bank.share * plain_s
        return min(int(work_s / affordable_s), c.LONGEST_REST) if affordable_s else 0

    def charge(
        self, record: RoundRecord, plain_s: float, *, is_plain: bool, expected_s: float = 0.0
    ) -> tuple[float, float]:
        """Credit and charge the bank. Returns seconds of (our own work, the pass), without stalls of the machine.

        `expected_s`: the expected time of drafting; infinite while its cost is unknown, so that all of it is charged.
        """
        pass_s = min(record.verify_s, c.LATE * self.costs.pass_s(record.width, record.position))
        late_s = self._late_s(pass_s, plain_s, is_plain)
        if is_plain:
            self.costs.round.decoded(record.judge_s)
            work_s = self.bank.own_work(record.draft_s + self.learning_s, expected_s, plain_s)
            self.bank.decoded(plain_s, work_s + max(late_s, 0.0))
            return work_s, pass_s
        self._since_plain += 1
        num_tokens = record.accepted_tokens + 1
        own_s = self.costs.round.speculated(num_tokens, record.judge_s + self.learning_s)
        work_s = self.bank.own_work(record.draft_s + own_s, expected_s + self.costs.round.round_s, plain_s)
        self.bank.speculated(num_tokens, work_s + pass_s, plain_s)
        return work_s, pass_s

    def _late_s(self, pass_s: float, plain_s: float, is_plain: bool) -> float:
        """The extra time of a plain pass because the previous one was wider, which is the fault of speculation."""
        was_wide = self._before == "wide" and not self.costs.is_shared
        late_s = pass_s - plain_s if is_plain and was_wide else 0.0
        is_as_expected = abs(late_s - self.costs.round.after_s) <= c.SAME_PACE * plain_s
        if was_wide:
            self.costs.round.followed(late_s if is_plain else None)
        if is_plain and (not was_wide or is_as_expected):  # else wait for the next pass, a usual one
            if self.is_refresh_due:
                self._refresh_after = min(2 * self._refresh_after, c.REFRESH_EVERY)
            self._since_plain = 0
        return late_s

    def learn_pass(self, record: RoundRecord, plain_s: float, *, is_plain: bool) -> None:
        """Learn what the pass of a round that was charged cost. `plain_s`: what a plain pass was believed to take."""
        # A plain pass after a wide one is slower, so it does not count unless it is faster than plain passes were
        # believed to be.
        is_telling = self._before == "plain" or record.verify_s < (1.0 - c.SAME_PACE) * plain_s
        if not is_plain or is_telling or not self.costs.curve.is_sure_of_plain():
            self.costs.observe_pass(record)
        self._before = "plain" if is_plain else "wide"
        if self.costs.curve.is_scaled and self.bank.is_guessed:
            scaled_s = self.costs.curve.at(1, record.position)
            self.bank.scale(c.START_PASSES * scaled_s)
            self._open_bank(scaled_s)

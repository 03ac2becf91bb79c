"""What the time of each round went to: it is charged to the time bank, and teaches what passes cost.

A plain pass after a wider one may take longer than usual, which is due to speculation. So this also knows what the pass
before was, and when a plain pass is due to be timed again.
"""

from __future__ import annotations

from edgespec.control import constants as c
from edgespec.control.bank import TimeBank
from edgespec.control.run_cost import RunCosts
from edgespec.types import RoundRecord


class Accounts:
    """Of one sequence. `costs`: what passes and drafts cost; `bank`: what may be lost; sequences may share both."""

    def __init__(self, costs: RunCosts, bank: TimeBank) -> None:
        self.costs, self.bank = costs, bank
        self.learning_s = 0.0  # that learning from the last round took
        self._since_plain, self._refresh_after = 0, c.REFRESH_FIRST
        self._before = ""  # the pass before: "plain", "wide" (of a round that speculated), or "" for the prompt's
        self._prefill_s = 0.0

    def begin(self, num_tokens: int, prefill_s: float) -> None:
        """A generation begins after a prompt of `num_tokens`, which was read in `prefill_s`."""
        self._before, self._prefill_s = "", prefill_s
        self._open_bank(self.costs.curve.at(1, num_tokens))

    def _open_bank(self, plain_s: float) -> None:
        self.bank.open(c.START_PASSES * plain_s, c.MOST_PASSES * plain_s, c.KEPT_PASSES * plain_s)
        self.bank.waited(self._prefill_s)  # so that a draft model can read a long prompt

    def rested(self, num_rounds: int, context: int) -> None:
        """So many plain rounds went by undecided."""
        self.bank.decoded(num_rounds * self.costs.plain_s(context), 0.0)
        self._since_plain, self._before = 0, "plain"

    @property
    def is_refresh_due(self) -> bool:
        """Whether so many rounds speculated that a plain pass has to be timed again."""
        return self._since_plain >= self._refresh_after

    def rounds_to_earn(self, work_s: float, plain_s: float) -> int:
        """Plain rounds until deciding, which took `work_s`, has cost no more than its share of them."""
        affordable_s = c.DECIDING_SHARE * self.bank.share * plain_s
        return min(int(work_s / affordable_s), c.LONGEST_REST) if affordable_s else 0

    def charge(
        self, record: RoundRecord, plain_s: float, *, is_plain: bool, expected_s: float = 0.0
    ) -> tuple[float, float]:
        """Credit and charge the bank; seconds of (our own work, the pass), without stalls of the machine.

        `expected_s`: of drafting; infinite where no cost is known: then all time is charged.
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
        """What a plain pass took more than usual since the one before was wider, which is due to speculation."""
        was_wide = self._before == "wide" and not self.costs.is_shared
        late_s = pass_s - plain_s if is_plain and was_wide else 0.0
        is_as_expected = abs(late_s - self.costs.round.after_s) <= c.SAME_PACE * plain_s
        if was_wide:
            self.costs.round.followed(late_s if is_plain else None)
        if is_plain and (not was_wide or is_as_expected):  # else the next pass, a usual one, tells the pace
            if self.is_refresh_due:
                self._refresh_after = min(2 * self._refresh_after, c.REFRESH_EVERY)
            self._since_plain = 0
        return late_s

    def learn_pass(self, record: RoundRecord, plain_s: float, *, is_plain: bool) -> None:
        """Learn what the pass of a charged round cost, whose plain pass was believed to take `plain_s`."""
        # Not a plain pass after a wide one, which is slower, unless it shows that plain passes take less than believed.
        is_telling = self._before == "plain" or record.verify_s < (1.0 - c.SAME_PACE) * plain_s
        if not is_plain or is_telling or not self.costs.curve.is_sure_of_plain():
            self.costs.observe_pass(record)
        self._before = "plain" if is_plain else "wide"
        if self.costs.curve.is_scaled and self.bank.is_guessed:
            scaled_s = self.costs.curve.at(1, record.position)
            self.bank.scale(c.START_PASSES * scaled_s)
            self._open_bank(scaled_s)

"""What the rounds of a run cost and earn, also where sequences share passes, and what the time bank is charged.

Where passes are shared, each sequence pays 1/n of a plain pass over all n, so that a token of any is worth the same and
the total tokens per second are maximised. A draft costs what its rows add to the pass that runs anyway, or its share of
what all drafts add, whichever is more: where costs rise in steps, each draft alone would seem free beside the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

from edgespec.control import constants as c
from edgespec.control.bank import TimeBank
from edgespec.control.cost import WIDEST, CostCurve, DraftCost, moved
from edgespec.control.length import Prices, least_ahead
from edgespec.reports import RoundRecord

_MOST_CHANGE = 0.1  # of the overhead of a round, until prices are made anew


class Sharing(NamedTuple):
    """The rows of other sequences in a sequence's next passes.

    `num_sequences`: those that decode, this one among them; `other_rows`: rows of all others, `drafted_rows` of them
    drafts, the rest their plain rows and prompts; `splits`: whether the engine runs a pass with different numbers of
    rows of several sequences as several passes. `table`: seconds of a pass by its rows.
    """

    num_sequences: int = 1
    other_rows: int = 0
    drafted_rows: int = 0
    splits: bool = False

    def plain_s(self, table: Sequence[float]) -> float:
        """Seconds of its share of a plain pass."""
        return seconds_of(table, self.num_sequences) / self.num_sequences

    def added_s(self, table: Sequence[float], num_rows: int) -> float:
        """Seconds that `num_rows` of its rows instead of one add to its share."""
        if self.num_sequences == 1 and not self.other_rows:
            return seconds_of(table, num_rows) - table[1]
        count, drafted = self.num_sequences, self.drafted_rows
        beside = self.other_rows - (count - 1)  # rows of drafts and prompts of others
        all_s = whole_s(table, count, beside + num_rows - 1, splits=self.splits)
        without_own_s = whole_s(table, count, beside, splits=self.splits)
        without_drafts_s = whole_s(table, count, beside - drafted, splits=self.splits)
        share = (num_rows - 1) / max(num_rows - 1 + drafted, 1)
        return max(all_s - without_own_s, (all_s - without_drafts_s) * share)


def whole_s(table: Sequence[float], count: int, more: int, *, splits: bool) -> float:
    """Seconds of a pass over a row of each of `count` sequences and `more` rows of some of them."""
    if splits and count > 1 and more:
        return seconds_of(table, count) + seconds_of(table, more)
    return seconds_of(table, count + more)


def seconds_of(table: Sequence[float], width: int) -> float:
    """Seconds of a pass; beyond the table, rows cost the average of its upper half."""
    if width <= WIDEST:
        return table[width]
    return table[WIDEST] + (width - WIDEST) * (table[WIDEST] - table[WIDEST // 2]) / (WIDEST - WIDEST // 2)


class RunCosts:
    """What passes, drafts and rounds cost with the threads in use, and how many tokens per second the run earns.

    `curve`: the target's passes; `drafts`: each drafter's tokens; `threads`: the number that both were learnt with.
    `round_s`: the overhead of a speculative round beyond its draft, its pass and choosing its tokens: negligible beside
    a large model's pass, and longer than a tiny one's.
    """

    def __init__(self, curve: CostCurve, drafts: dict[str, DraftCost], threads: int) -> None:
        self.curve, self.drafts = curve, drafts
        self.splits = False  # of Sharing
        self.round_s = self.choosing_s = 0.0  # the overhead of a round; choosing one token when nothing is drafted
        self._known: dict[int, tuple[CostCurve, dict[str, DraftCost]]] = {}  # by threads
        self._threads = self._next_threads = threads  # of the costs in use, and of the next round
        self._tokens, self._seconds = 0.0, 0.0  # of recent rounds, decaying
        self._sharing = Sharing()
        self.was_shared = False  # the last pass, which no single round's time tells of
        self._made_of: tuple[object, object, float] = None, None, 0.0  # what the next two were made of
        self._pass_s: list[float] = []
        self._ahead_s: list[float] = []
        self._ahead: list[float] = []  # the latter at the usual pace
        self._ahead_of: list[float] | None = None  # the shape that it was made of

    def use_threads(self, threads: int) -> None:
        """Takes effect at the next round, since the outcome of the last one belongs to the old number."""
        self._next_threads = threads

    def follow_threads(self) -> None:
        """A round begins: switch to the costs of its number of threads; unknown ones start as a copy of the current.

        A guess is copied too: shared, the first number of threads that is timed would set the costs of all.
        """
        threads = self._next_threads
        if threads == self._threads:
            return
        self._known[self._threads] = self.curve, self.drafts
        if threads not in self._known:
            self._known[threads] = deepcopy((self.curve, self.drafts))
        self._threads, (self.curve, self.drafts) = threads, self._known[threads]

    def share_passes(self, num_sequences: int, other_rows: int, prompt_rows: int = 0) -> None:
        """The next passes hold `other_rows` rows of others as well, `prompt_rows` of them of prompts.

        `num_sequences`: those that decode.
        """
        drafted_rows = max(other_rows - prompt_rows - (num_sequences - 1), 0)
        before, now = self._sharing, Sharing(num_sequences, other_rows, drafted_rows, self.splits)
        if now == before:
            return  # the same object, so that prices need not be made anew
        self._sharing = now
        if num_sequences != before.num_sequences:
            table = self.curve.table()
            self._seconds *= self._sharing.plain_s(table) / before.plain_s(table)

    @property
    def is_shared(self) -> bool:
        """Whether the next passes hold rows of other sequences."""
        return self._sharing.num_sequences > 1 or self._sharing.other_rows > 0

    @property
    def most_rows(self) -> int:
        """How many rows of one sequence have a known cost; always a few, even beside a prompt (no logits)."""
        return max(WIDEST - self._sharing.other_rows, c.LEAST_SHARED_ROWS)

    def draft(self, name: str) -> DraftCost:
        """What a drafter's tokens cost, given the sequences that share the next passes."""
        cost = self.drafts[name]
        if cost.is_relative and self.curve.is_scaled:  # another controller's answers timed the curve, which both share
            cost.scale(self.curve.at(1))
        return cost.among(self._sharing.num_sequences)

    def plain_s(self) -> float:
        """Seconds of a plain pass, or one sequence's share of it."""
        return self._sharing.plain_s(self.curve.table())

    def pass_s(self, num_rows: int) -> float:
        """Seconds of a pass over `num_rows` rows, or one sequence's share of it."""
        table = self.curve.table()
        return self._sharing.plain_s(table) + self._sharing.added_s(table, num_rows)

    def prices(self) -> Prices:
        """What rounds cost: the pass, and the overhead if something is drafted."""
        table, sharing, round_s = self.curve.table(), self._sharing, self.round_s
        made_of, made_for, made_with_s = self._made_of
        if made_of is not table or made_for is not sharing or abs(round_s - made_with_s) > _MOST_CHANGE * made_with_s:
            widths, plain_s = c.MAX_AUTO_LENGTH + c.FORESIGHT + 2, sharing.plain_s(table)
            if self.is_shared:
                wider = [plain_s + sharing.added_s(table, width) for width in range(2, widths)]
                self._ahead_s, self._ahead_of = least_ahead([0.0, plain_s, *wider]), None
            else:
                wider, shape, pace = table[2:widths], self.curve.shape, self.curve.pace
                if self._ahead_of is not shape:
                    self._ahead, self._ahead_of = least_ahead(shape[:widths]), shape
                self._ahead_s = [pace * each_s for each_s in self._ahead]
            self._pass_s = [0.0, plain_s, *[pass_s + round_s for pass_s in wider]]
            self._made_of = table, sharing, round_s
        return Prices(self._pass_s, self._ahead_s, self.rate(self._pass_s[1]))

    def rate(self, plain_s: float) -> float:
        """Tokens per second that this run earns; never less than plain decoding would."""
        return max(self._tokens / self._seconds if self._seconds else 0.0, 1.0 / plain_s)

    def earned(self, num_tokens: int, seconds: float) -> None:
        """A round emitted `num_tokens` in `seconds`."""
        self._tokens = c.RATE_MEMORY * self._tokens + num_tokens
        self._seconds = c.RATE_MEMORY * self._seconds + seconds

    # -- learning

    def observe_pass(self, record: RoundRecord) -> None:
        """Learn what a round's pass cost. A disturbed one counts only until a first pass was timed."""
        if not self.was_shared and (not self.curve.is_scaled or not record.is_disturbed):
            self._observe(record.width, record.verify_s)

    def observe_shared(self, widths: Sequence[int], seconds: float) -> None:
        """Learn what a pass over rows of several sequences took, `widths` of each; no drafts: all are 1."""
        table, count, num_rows = self.curve.table(), len(widths), sum(widths)
        if not self.curve.is_sure_of_plain:  # learn the cost of plain passes first
            expected_s = whole_s(table, count, num_rows - count, splits=self.splits)
            self._observe(1, seconds * self.curve.at(1) / expected_s)
            return
        is_plain = num_rows == count
        if self.splits and max(widths) > min(widths):  # all but the second of its passes are known well
            seconds, num_rows = seconds - seconds_of(table, count), num_rows - count
        if num_rows <= WIDEST and seconds > 0:
            self._observe(num_rows, seconds, is_plain=is_plain)

    def parts_of(self, widths: Sequence[int], prompt_rows: int) -> list[float]:
        """Each decoding sequence's share, in seconds, of a pass with rows of `widths` and `prompt_rows` of prompts.

        They sum to the whole pass less what the prompts add; what the drafts add is divided by their rows.
        """
        table, count, drafted = self.curve.table(), len(widths), sum(widths) - len(widths)
        plain_s = seconds_of(table, count) / count
        all_s = whole_s(table, count, drafted + prompt_rows, splits=self.splits)
        added_s = all_s - whole_s(table, count, prompt_rows, splits=self.splits)
        return [plain_s + added_s * (width - 1) / max(drafted, 1) for width in widths]

    def _observe(self, width: int, seconds: float, *, is_plain: bool = False) -> None:
        was_guessed = not self.curve.is_scaled
        self.curve.observe(width, seconds, is_plain=is_plain)
        if was_guessed and self.curve.is_scaled:
            for cost in self.drafts.values():
                cost.scale(self.curve.at(1))

    def observe_round(self, num_tokens: int, seconds: float) -> float:
        """A round of `num_tokens` took `seconds` besides drafting and its pass; returns the part due to speculation."""
        extra_s = max(seconds - num_tokens * self.choosing_s, 0.0)
        self.round_s = moved(self.round_s, max(extra_s, 1e-7))
        return extra_s


class Accounts:
    """The accounts of one sequence; several may share `costs` (of passes and drafts) and `bank` (what may be lost).

    A plain pass after a wider one may take longer than usual, since llama.cpp plans its graph anew. Speculation is to
    blame, so it pays for that, and the pass says nothing of what plain ones cost.
    """

    def __init__(self, costs: RunCosts, bank: TimeBank) -> None:
        self.costs, self.bank = costs, bank
        self.learning_s = 0.0  # time spent on learning from the last round
        self._was_wide = False  # the previous pass
        self._prefill_s = 0.0

    def begin(self, prefill_s: float) -> None:
        """A generation begins after a prompt that was read in `prefill_s`."""
        self._was_wide, self._prefill_s = False, prefill_s
        self._open_bank(self.costs.curve.at(1))

    def _open_bank(self, plain_s: float) -> None:
        self.bank.open(c.MOST_PASSES * plain_s)
        self.bank.waited(self._prefill_s)  # so that a draft model can read a long prompt

    def charge(
        self, record: RoundRecord, plain_s: float, *, is_plain: bool, expected_s: float = 0.0
    ) -> tuple[float, float]:
        """Credit and charge the bank, and learn what the pass cost. Returns seconds of (our own work, the pass).

        Neither counts stalls of the machine. `expected_s`: the expected time of drafting; infinite while its cost is
        unknown, so that all of it is charged.
        """
        costs, bank = self.costs, self.bank
        pass_s = min(record.verify_s, c.LATE * costs.pass_s(record.width))
        was_wide, self._was_wide = self._was_wide and not costs.is_shared, not is_plain
        if is_plain:
            costs.choosing_s = moved(costs.choosing_s, record.judge_s)
            work_s = bank.own_work(record.draft_s + self.learning_s, expected_s, plain_s)
            bank.decoded(plain_s, work_s + (max(pass_s - plain_s, 0.0) if was_wide else 0.0))
        else:
            num_tokens = record.accepted_tokens + 1
            own_s = costs.observe_round(num_tokens, record.judge_s + self.learning_s)
            work_s = bank.own_work(record.draft_s + own_s, expected_s + costs.round_s, plain_s)
            bank.speculated(num_tokens, work_s + pass_s, plain_s)
        is_telling = not is_plain or not was_wide or record.verify_s < plain_s
        if is_telling or not costs.curve.is_sure_of_plain:
            costs.observe_pass(record)
        if costs.curve.is_sure_of_plain and bank.is_guessed:
            scaled_s = costs.curve.at(1)
            bank.scale(c.START_PASSES * scaled_s)
            self._open_bank(scaled_s)
        return work_s, pass_s

"""What the passes, drafts and rounds of a run cost, and the tokens per second that it earns."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from edgespec.control import constants as c
from edgespec.control.cost import WIDEST, CostCurve
from edgespec.control.draft_cost import DraftCost, RoundCost
from edgespec.control.length import Prices, least_ahead
from edgespec.control.sharing import Sharing, parts_of, seconds_of, whole_s
from edgespec.reports import RoundRecord


class RunCosts:
    """What passes, drafts and rounds cost with the threads in use, and how many tokens per second the run earns.

    `curve`: the target's passes; `drafts`: each drafter's tokens; `threads`: the number that both were measured with;
    `splits`: whether the engine runs a pass with different numbers of rows of several sequences as several passes.
    """

    def __init__(self, curve: CostCurve, drafts: dict[str, DraftCost], threads: int) -> None:
        self.curve, self.drafts, self.round = curve, drafts, RoundCost()
        self.splits = False
        self._known: dict[int, tuple[CostCurve, dict[str, DraftCost]]] = {}  # by threads
        self._threads = self._next_threads = threads  # of the costs in use, and of the next round
        self._tokens, self._seconds = 0.0, 0.0  # of recent rounds, decaying
        self._table: list[float] = []  # of the curve, from which the next three were made
        self._pass_s: list[float] = []
        self._ahead_s: list[float] = []
        self._round_s = 0.0
        self._sharing = Sharing()
        self._shared: tuple[object, list[float], list[float]] = (None, [], [])  # cached prices of shared passes

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
            self._known[threads] = self._copies()
        self._threads, (self.curve, self.drafts) = threads, self._known[threads]
        self._table = []

    def _copies(self) -> tuple[CostCurve, dict[str, DraftCost]]:
        if not self.curve.is_scaled:
            return deepcopy((self.curve, self.drafts))
        timed = {name: self._timed(cost) for name, cost in self.drafts.items()}
        copies = {name: DraftCost(cost.token_s, cost.read_s, is_once=cost.is_once) for name, cost in timed.items()}
        return CostCurve(self.curve.refined(), self.curve.context), copies

    def share_passes(self, num_sequences: int, other_rows: int, prompt_rows: int = 0) -> None:
        """The next passes hold `other_rows` rows of others as well, `prompt_rows` of them of prompts.

        `num_sequences`: those that decode. What this one pays then: `Sharing`.
        """
        before = self._sharing
        self._sharing = Sharing.beside(num_sequences, other_rows, prompt_rows, splits=self.splits)
        if num_sequences != before.num_sequences:
            table = self.curve.table(0)
            self._seconds *= self._sharing.plain_s(table) / before.plain_s(table)

    def draft(self, name: str) -> DraftCost:
        """What a drafter's tokens cost, given the sequences that share the next passes."""
        return self._timed(self.drafts[name]).among(self._sharing.num_sequences)

    def _timed(self, cost: DraftCost) -> DraftCost:
        if cost.is_relative and self.curve.is_scaled:  # another controller's answers timed the curve, which both share
            cost.scale(self.curve.at(1))
        return cost

    @property
    def is_shared(self) -> bool:
        """Whether the next passes hold rows of other sequences."""
        return bool(self._sharing)

    @property
    def most_rows(self) -> int:
        """How many rows of one sequence have a known cost; always a few, even beside a prompt (no logits)."""
        return max(WIDEST - self._sharing.other_rows, c.LEAST_SHARED_ROWS)

    def plain_s(self, context: int) -> float:
        """Seconds of a plain pass, or one sequence's share of it, with `context` tokens in the cache."""
        return self._sharing.plain_s(self.curve.table(context))

    def pass_s(self, num_rows: int, context: int) -> float:
        """Seconds of a pass over `num_rows` rows, or one sequence's share of it."""
        table = self.curve.table(context)
        return self._sharing.plain_s(table) + self._sharing.added_s(table, num_rows)

    def parts_of(self, widths: Sequence[int], prompt_rows: int, context: int) -> list[float]:
        """Each decoding sequence's share, in seconds, of a pass: see `sharing.parts_of`."""
        return parts_of(self.curve.table(context), widths, prompt_rows, splits=self.splits)

    def observe_shared(self, widths: Sequence[int], context: int, seconds: float) -> None:
        """Learn what a pass over rows of several sequences took, `widths` of each; no drafts: all are 1."""
        table, count, num_rows = self.curve.table(context), len(widths), sum(widths)
        if not self.curve.is_sure_of_plain():  # learn the cost of plain passes first
            expected_s = whole_s(table, count, num_rows - count, splits=self.splits)
            self._observe(1, context, seconds * self.curve.at(1, context) / expected_s)
            return
        is_plain = num_rows == count
        if self.splits and max(widths) > min(widths):  # all but the second of its passes are known well
            seconds, num_rows = seconds - seconds_of(table, count), num_rows - count
        if num_rows <= WIDEST and seconds > 0:
            self._observe(num_rows, context, seconds, is_plain=is_plain)

    def _shared_prices(self, context: int) -> Prices:
        table, round_s = self.curve.table(context), self.round.price_s
        key = (table, self._sharing, round_s)
        if self._shared[0] != key:
            plain_s = self._sharing.plain_s(table)
            widths = range(2, min(c.MAX_AUTO_LENGTH + c.FORESIGHT + 2, WIDEST + 1))
            pass_s = [0.0, plain_s, *(plain_s + self._sharing.added_s(table, width) + round_s for width in widths)]
            self._shared = key, pass_s, least_ahead(pass_s[: c.MAX_AUTO_LENGTH + 2])
        _, pass_s, ahead_s = self._shared
        return Prices(pass_s, ahead_s, self.rate(pass_s[1]))

    def prices(self, context: int) -> Prices:
        """What rounds cost with `context` tokens in the cache: the pass, and the overhead if something is drafted."""
        if self.is_shared:
            return self._shared_prices(context)
        table, round_s = self.curve.table(context), self.round.price_s
        if self._table is not table:
            self._ahead_s = least_ahead(table[: c.MAX_AUTO_LENGTH + 2])
        if self._table is not table or self._round_s != round_s:
            self._table, self._round_s = table, round_s
            self._pass_s = [*table[:2], *(seconds + round_s for seconds in table[2:])]
        return Prices(self._pass_s, self._ahead_s, self.rate(table[1]))

    def rate(self, plain_s: float) -> float:
        """Tokens per second that this run earns; never less than plain decoding would."""
        return max(self._tokens / self._seconds if self._seconds else 0.0, 1.0 / plain_s)

    def earned(self, num_tokens: int, seconds: float) -> None:
        """A round emitted `num_tokens` in `seconds`."""
        self._tokens = c.RATE_MEMORY * self._tokens + num_tokens
        self._seconds = c.RATE_MEMORY * self._seconds + seconds

    def observe_pass(self, record: RoundRecord) -> None:
        """Learn what a round's pass cost. A disturbed one counts only until a first pass was timed."""
        if self.is_shared:
            return  # `observe_shared` learns it
        if not self.curve.is_scaled or not record.is_disturbed:
            self._observe(record.width, record.position, record.verify_s)

    def read_prompt(self, num_tokens: int, seconds: float) -> None:
        """Learn what the tokens of a prompt cost, that were read in wide passes of nobody else."""
        if num_tokens >= c.LEAST_READ and seconds > 0 and not self.is_shared:
            self.curve.read_prompt(seconds / num_tokens)

    def _observe(self, width: int, context: int, seconds: float, *, is_plain: bool = False) -> None:
        was_guessed = not self.curve.is_scaled
        self.curve.observe(width, context, seconds, is_plain=is_plain)
        if was_guessed and self.curve.is_scaled:
            for cost in self.drafts.values():
                cost.scale(self.curve.at(1, context))

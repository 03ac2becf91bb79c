"""What one of several sequences pays for the passes that they share.

`table`: seconds of a pass by its rows, as `CostCurve.table` gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.control.cost import WIDEST


@dataclass(frozen=True, slots=True)
class Sharing:
    """The rows of other sequences in a sequence's next passes, and what its own rows cost beside them.

    `num_sequences`: those that decode, this one among them; `other_rows`: rows of all others, `drafted_rows` of them
    drafts, the rest their plain rows and prompts; `splits`: whether the engine runs a pass with different numbers of
    rows of several sequences as several passes. Each pays 1/n of a plain pass over all of them, so that a token of any
    is worth the same and the total tokens per second are maximised. A draft costs what its rows add to the pass that
    runs anyway, or its share of what all drafts add, whichever is more: where costs rise in steps, each draft alone
    would seem free beside the others.
    """

    num_sequences: int = 1
    other_rows: int = 0
    drafted_rows: int = 0
    splits: bool = False

    @classmethod
    def beside(cls, num_sequences: int, other_rows: int, prompt_rows: int, *, splits: bool) -> Sharing:
        """Of passes that also hold `other_rows` rows of others, `prompt_rows` of them of prompts."""
        drafted = max(other_rows - prompt_rows - (num_sequences - 1), 0)
        return cls(num_sequences, other_rows, drafted, splits)

    def __bool__(self) -> bool:
        """Whether the passes hold rows of other sequences."""
        return self.num_sequences > 1 or self.other_rows > 0

    def plain_s(self, table: Sequence[float]) -> float:
        """Seconds of its share of a plain pass."""
        return seconds_of(table, self.num_sequences) / self.num_sequences

    def added_s(self, table: Sequence[float], num_rows: int) -> float:
        """Seconds that `num_rows` of its rows instead of one add to its share."""
        count, drafted = self.num_sequences, self.drafted_rows
        beside = self.other_rows - (count - 1)  # rows of drafts and prompts of others
        all_s = whole_s(table, count, beside + num_rows - 1, splits=self.splits)
        without_own_s = whole_s(table, count, beside, splits=self.splits)
        without_drafts_s = whole_s(table, count, beside - drafted, splits=self.splits)
        share = (num_rows - 1) / max(num_rows - 1 + drafted, 1)
        return max(all_s - without_own_s, (all_s - without_drafts_s) * share)


def parts_of(table: Sequence[float], widths: Sequence[int], prompt_rows: int, *, splits: bool) -> list[float]:
    """Each decoding sequence's share, in seconds, of a pass with rows of `widths` and `prompt_rows` of prompts.

    They sum to the whole pass less what the prompts add; what the drafts add is divided by their rows.
    """
    count, drafted = len(widths), sum(widths) - len(widths)
    plain_s = seconds_of(table, count) / count
    all_s = whole_s(table, count, drafted + prompt_rows, splits=splits)
    added_s = all_s - whole_s(table, count, prompt_rows, splits=splits)
    return [plain_s + added_s * (width - 1) / max(drafted, 1) for width in widths]


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

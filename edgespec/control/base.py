"""How many tokens each round may draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round cost and brought; times in seconds, `width` the rows of its target pass."""

    width: int
    drafted_tokens: int
    accepted_tokens: int
    draft_s: float
    verify_s: float


class Controller(ABC):
    """Decides before each round, is asked during drafting, and learns from the outcome."""

    @abstractmethod
    def max_draft_tokens(self, context_tokens: int) -> int:
        """Most tokens the next round may draft with `context_tokens` in the cache; 0 is plain decoding."""

    def worth_going_on(self, index: int, confidence: float) -> bool:
        """Whether draft token `index` is worth its cost; `confidence`: the probability that all before it stand."""
        return True

    def observe(self, report: RoundReport) -> None:
        """Learn from a finished round."""


class FixedLength(Controller):
    """The same draft length every round."""

    def __init__(self, draft_length: int) -> None:
        self.draft_length = draft_length

    def max_draft_tokens(self, context_tokens: int) -> int:
        return self.draft_length

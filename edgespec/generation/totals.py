"""Counters summed over several generations."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.reports import Stats


@dataclass(slots=True)
class Totals:
    """Sums over generations. `decoded_tokens` excludes the first token of each, which prefill yields.

    Ratios are properties, 0 if there is nothing to divide by. Times in seconds.
    """

    num_generations: int = 0
    new_tokens: int = 0
    decoded_tokens: int = 0
    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_s: float = 0.0

    def add(self, stats: Stats) -> None:
        self.num_generations += 1
        self.new_tokens += stats.new_tokens
        self.decoded_tokens += max(stats.new_tokens - 1, 0)
        self.rounds += stats.rounds
        self.drafted_tokens += stats.drafted_tokens
        self.accepted_tokens += stats.accepted_tokens
        self.decode_s += stats.decode_s

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per verifying target pass."""
        return self.decoded_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed without prefill."""
        return self.decoded_tokens / self.decode_s if self.decode_s > 0 else 0.0

"""Counters of the server, and their text for Prometheus (exposition format 0.0.4).

Decoding counters are written by the scheduler's thread only, request counters by the event loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edgespec.types import RoundRecord, Stats

Rows = Iterable[tuple[str, float]]


@dataclass(slots=True)
class Metrics:
    """`answered`: requests by (route, status). `accepted_at`: accepted draft tokens by their position in the draft."""

    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    target_passes: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0
    first_tokens: int = 0

    def count_round(self, record: RoundRecord) -> None:
        """Count what became of one round's draft."""
        if record.drafted_tokens:
            self.drafts += 1
            for position in range(record.accepted_tokens):
                self.accepted_at[position] += 1

    def add(self, stats: Stats, *, has_failed: bool) -> None:
        """Add a generation that has ended."""
        self.finished["error" if has_failed else stats.finish_reason or "cancelled"] += 1
        self.drafted_tokens += stats.drafted_tokens
        self.accepted_tokens += stats.accepted_tokens
        self.prompt_tokens += stats.prompt_tokens
        self.reused_tokens += stats.reused_tokens
        self.new_tokens += stats.new_tokens
        self.target_passes += stats.target_passes
        self.prefill_s += stats.prefill_s
        self.decode_s += max(stats.decode_s, 0.0)

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All counters as Prometheus reads them, after `gauges`: (help, value) by name."""
        lines = [line for name, (help, value) in gauges.items() for line in _metric(name, "gauge", help, [("", value)])]
        for name, help, rows in self._counters():
            lines += _metric(name, "counter", help, rows)
        return "\n".join(lines) + "\n"

    def _counters(self) -> Iterable[tuple[str, str, Rows]]:
        answered = [(f'{{path="{path}",status="{status}"}}', n) for (path, status), n in sorted(self.answered.items())]
        yield "http_requests_total", "Requests by path and status", answered
        yield "queue_refusals_total", "Requests refused because the queue was full", [("", self.refused)]
        finished = [(f'{{reason="{reason}"}}', n) for reason, n in sorted(self.finished.items())]
        yield "generations_total", "Generations that have ended, by finish reason", finished
        yield "prompt_tokens_total", "Prompt tokens, cached ones included", [("", self.prompt_tokens)]
        yield "prompt_tokens_cached_total", "Prompt tokens found in the cache", [("", self.reused_tokens)]
        yield "tokens_total", "Generated tokens", [("", self.new_tokens)]
        yield "target_passes_total", "Passes of the target", [("", self.target_passes)]
        yield "prefill_seconds_total", "Time spent on prompts", [("", self.prefill_s)]
        yield "decode_seconds_total", "Time spent on answers", [("", self.decode_s)]
        yield "time_to_first_token_seconds_total", "Time from request to first token", [("", self.first_token_s)]
        yield "first_tokens_total", "Answers that have begun", [("", self.first_tokens)]
        yield "draft_rounds_total", "Rounds that verified a draft", [("", self.drafts)]
        yield "draft_tokens_total", "Drafted tokens", [("", self.drafted_tokens)]
        yield "draft_tokens_accepted_total", "Accepted draft tokens", [("", self.accepted_tokens)]
        positions = [(f'{{position="{position}"}}', n) for position, n in sorted(self.accepted_at.items())]
        yield "draft_tokens_accepted_per_position_total", "Accepted draft tokens by position in the draft", positions


def _metric(name: str, kind: str, help: str, rows: Rows) -> list[str]:
    full = f"edgespec_{name}"
    return [f"# HELP {full} {help}.", f"# TYPE {full} {kind}", *(f"{full}{labels} {value!r}" for labels, value in rows)]

"""Counters of the server, and their text for Prometheus (exposition format 0.0.4).

Decoding counters are written by the scheduler's thread only, request counters by the event loop only: each model has
its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Self

from edgespec.reports import RoundRecord, Stats
from edgespec.server.histogram import Histogram

Rows = Iterable[tuple[str, float]]


@dataclass(slots=True)
class Metrics:
    """`answered`: requests by (route, status). `drafted_at`, `accepted_at`: draft tokens by position in the draft;
    `drafted_by`, `accepted_by`: by the name of the drafter. `duration_s`: from a request to its end.
    """

    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    drafted_at: Counter[int] = field(default_factory=Counter)
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    to_first_token_s: Histogram = field(default_factory=Histogram)
    duration_s: Histogram = field(default_factory=Histogram)
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

    @classmethod
    def sum_of(cls, several: Iterable[Metrics]) -> Self:
        """The counters of several models, each of which has a thread that writes."""
        total = cls()
        for each, name in product(several, (each.name for each in fields(cls))):
            mine, its = getattr(total, name), getattr(each, name)
            if isinstance(mine, Counter):
                mine.update(dict(its))  # a copy: its thread may add a key meanwhile
            elif isinstance(mine, Histogram):
                mine.include(its)
            else:
                setattr(total, name, mine + its)
        return total

    def count_round(self, record: RoundRecord) -> None:
        """Count what became of one round's draft."""
        if record.drafted_tokens:
            self.drafts += 1
            self.drafted_at.update(range(record.depth))
            self.accepted_at.update(range(record.accepted_tokens))
            self.drafted_by[record.drafter or ""] += record.drafted_tokens
            self.accepted_by[record.drafter or ""] += record.accepted_tokens

    def count_first_token(self, seconds: float) -> None:
        """Count the first token of an answer, `seconds` after its request."""
        self.first_token_s += seconds
        self.first_tokens += 1
        self.to_first_token_s.add(seconds)

    def add(self, stats: Stats, *, has_failed: bool, duration_s: float) -> None:
        """Add a generation that has ended, `duration_s` after its request."""
        self.duration_s.add(duration_s)
        self.finished["error" if has_failed else stats.finish_reason or "cancelled"] += 1
        self.drafted_tokens += stats.drafted_tokens
        self.accepted_tokens += stats.accepted_tokens
        self.prompt_tokens += stats.prompt_tokens
        self.reused_tokens += stats.reused_tokens
        self.new_tokens += stats.new_tokens
        self.target_passes += stats.target_passes
        self.prefill_s += stats.prefill_s
        self.decode_s += max(stats.decode_s, 0.0)

    def text(self, gauges: Mapping[str, tuple[str, Rows]]) -> str:
        """All counters as Prometheus reads them, after `gauges`: (help, rows of labels and value) by name."""
        lines = [line for name, (help, rows) in gauges.items() for line in _metric(name, "gauge", help, rows)]
        for name, help, rows in self._counters():
            lines += _metric(name, "counter", help, rows)
        for name, help, histogram in (
            ("time_to_first_token_seconds", "Time from request to first token", self.to_first_token_s),
            ("request_duration_seconds", "Time from request to the end of its answer", self.duration_s),
        ):
            lines += histogram.lines(f"edgespec_{name}", help)
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
        by = [(f'{{drafter="{name}"}}', n) for name, n in sorted(self.drafted_by.items())]
        yield "drafter_tokens_total", "Drafted tokens by drafter", by
        by = [(f'{{drafter="{name}"}}', n) for name, n in sorted(self.accepted_by.items())]
        yield "drafter_tokens_accepted_total", "Accepted draft tokens by drafter", by
        positions = [(f'{{position="{position}"}}', n) for position, n in sorted(self.drafted_at.items())]
        yield "draft_tokens_per_position_total", "Drafts that reach a position, branches counted once", positions
        positions = [(f'{{position="{position}"}}', n) for position, n in sorted(self.accepted_at.items())]
        yield "draft_tokens_accepted_per_position_total", "Accepted draft tokens by position in the draft", positions


def _metric(name: str, kind: str, help: str, rows: Rows) -> list[str]:
    full = f"edgespec_{name}"
    return [f"# HELP {full} {help}.", f"# TYPE {full} {kind}", *(f"{full}{labels} {value!r}" for labels, value in rows)]

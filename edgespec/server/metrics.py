"""Counters of the server, and their text for Prometheus (exposition format 0.0.4).

All models of a server count together, each in the thread of its scheduler; requests are counted by the event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate
from threading import Lock
from typing import Any

from edgespec.config.options import GenerateOptions, LoadOptions
from edgespec.engines.base import EngineFacts
from edgespec.reports import RoundRecord, Stats

# A model of 0.5B answers a short prompt in some ten milliseconds; one of 70B reads a long prompt for minutes.
BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
Rows = Iterable[tuple[str, float]]  # what follows the name, and a value


class Histogram:
    """Counts values up to each of `BOUNDS_S`, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(BOUNDS_S, value)] += 1
        self._sum += value

    def rows(self) -> Rows:
        """Buckets, which count all values up to their bound, the sum and the count."""
        totals = list(accumulate(self._counts))  # read once, so that the last bucket is the count
        for bound, total in zip((*map(repr, BOUNDS_S), "+Inf"), totals, strict=True):
            yield f'_bucket{{le="{bound}"}}', total
        yield from (("_sum", self._sum), ("_count", totals[-1]))


def _count(name: str, help: str) -> Any:
    """A field of `Metrics`, and how /metrics shows it."""
    return field(default=0, metadata={"name": name, "help": help, "label": ""})


def _counts(name: str, help: str, label: str) -> Any:
    """The same of one that counts by key, which is `label`."""
    return field(default_factory=Counter, metadata={"name": name, "help": help, "label": label})


@dataclass(slots=True)
class Metrics:
    """`answered`: requests by (route, status); drafted and accepted tokens by drafter, and by position in the draft."""

    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    refused: int = _count("queue_refusals_total", "Requests refused because the queue was full")
    finished: Counter[str] = _counts("generations_total", "Generations that have ended, by finish reason", "reason")
    prompt_tokens: int = _count("prompt_tokens_total", "Prompt tokens, cached ones included")
    reused_tokens: int = _count("prompt_tokens_cached_total", "Prompt tokens found in the cache")
    new_tokens: int = _count("tokens_total", "Generated tokens")
    target_passes: int = _count("target_passes_total", "Passes of the target")
    prefill_s: float = _count("prefill_seconds_total", "Time spent on prompts")
    decode_s: float = _count("decode_seconds_total", "Time spent on answers")
    drafts: int = _count("draft_rounds_total", "Rounds that verified a draft")
    drafted_tokens: int = _count("draft_tokens_total", "Drafted tokens")
    accepted_tokens: int = _count("draft_tokens_accepted_total", "Accepted draft tokens")
    drafted_by: Counter[str] = _counts("drafter_tokens_total", "Drafted tokens by drafter", "drafter")
    accepted_by: Counter[str] = _counts("drafter_tokens_accepted_total", "Accepted draft tokens by drafter", "drafter")
    drafted_at: Counter[int] = _counts("draft_tokens_per_position_total", "Drafts that reach a position", "position")
    accepted_at: Counter[int] = _counts(
        "draft_tokens_accepted_per_position_total", "Accepted draft tokens by position", "position"
    )
    to_first_token_s: Histogram = field(default_factory=Histogram)
    duration_s: Histogram = field(default_factory=Histogram)  # from a request to its end
    _lock: Lock = field(default_factory=Lock)

    def count_round(self, record: RoundRecord) -> None:
        """Count what became of one round's draft."""
        if not record.drafted_tokens:
            return
        with self._lock:
            self.drafts += 1
            self.drafted_at.update(range(record.depth))
            self.accepted_at.update(range(record.accepted_tokens))
            self.drafted_by[record.drafter or ""] += record.drafted_tokens
            self.accepted_by[record.drafter or ""] += record.accepted_tokens

    def count_first_token(self, seconds: float) -> None:
        with self._lock:
            self.to_first_token_s.add(seconds)

    def add(self, stats: Stats, *, has_failed: bool, duration_s: float) -> None:
        with self._lock:
            self.duration_s.add(duration_s)
            self.finished["error" if has_failed else stats.finish_reason or "cancelled"] += 1
            for name in self.__slots__:
                if hasattr(stats, name):  # a counter of the same name
                    setattr(self, name, getattr(self, name) + max(getattr(stats, name), 0))

    def text(self, gauges: Mapping[str, tuple[str, Rows]]) -> str:
        """All counters as Prometheus reads them, after `gauges`: (help, rows of labels and value) by name."""
        lines = [line for name, (help, rows) in gauges.items() for line in _metric(name, "gauge", help, rows)]
        answered = [(f'{{path="{path}",status="{status}"}}', n) for (path, status), n in sorted(self.answered.items())]
        lines += _metric("http_requests_total", "counter", "Requests by path and status", answered)
        for each in fields(self):
            if about := each.metadata:
                value, label = getattr(self, each.name), about["label"]
                rows = [(f'{{{label}="{key}"}}', n) for key, n in sorted(value.items())] if label else [("", value)]
                lines += _metric(about["name"], "counter", about["help"], rows)
        first, whole = self.to_first_token_s.rows(), self.duration_s.rows()
        lines += _metric("time_to_first_token_seconds", "histogram", "Time from request to first token", first)
        lines += _metric("request_duration_seconds", "histogram", "Time from request to the end of its answer", whole)
        return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, help: str, rows: Rows) -> list[str]:
    full = f"edgespec_{name}"
    return [f"# HELP {full} {help}.", f"# TYPE {full} {kind}", *(f"{full}{labels} {value!r}" for labels, value in rows)]


def answer_line(
    stats: Stats, drafted: Mapping[str, int], options: GenerateOptions, loaded: LoadOptions, facts: EngineFacts
) -> str:
    """`drafted`: tokens by drafter; `options`: of the request; `loaded`, `facts`: of the model."""
    read = f"{stats.prompt_tokens} prompt tokens ({stats.reused_tokens} cached) in {1000 * stats.prefill_s:.0f} ms"
    speed = f"{stats.new_tokens} tokens at {stats.tokens_per_second:.1f} tokens/s ({stats.finish_reason or 'failed'})"
    is_off = (options.drafter or loaded.drafter) == "none"
    said = f"nothing drafted: {'off' if is_off else 'no gain' if facts.can_speculate else 'unable'}"
    if stats.drafted_tokens:
        by = ", ".join(f"{name} {count}" for name, count in sorted(drafted.items(), key=lambda pair: -pair[1]))
        accepted = f"{stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted"
        said = f"{accepted} ({stats.acceptance_rate:.0%}; {by})"
    return f"answer: {speed}, {read}, {said}"

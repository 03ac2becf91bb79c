"""Statistics of a set of trials: speeds, speedups with their spread, acceptance, time by phase, energy.

A speedup is computed per trial, from two consecutive runs, and reported as median and quartiles. The pooled speedup is
the ratio of total tokens per total seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median, quantiles
from typing import Any, Literal

from edgespec.bench.record import Measurement, Trial

Verdict = Literal["gains", "even", "loses", "unknown", "undrafted"]
_NOTICEABLE = 0.02  # smaller relative differences count as equal, or those that plain decoding has from itself
_LEAST_TRIALS = 3  # with fewer there is no verdict
_TIMES = ("prefill_s", "draft_s", "verify_s", "overhead_s")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of at least one value."""

    median: float
    q1: float
    q3: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return Spread(middle, low, high)

    def to_json(self) -> dict[str, float]:
        return {"median": self.median, "q1": self.q1, "q3": self.q3}


class Side:
    """All runs of one decoding mode."""

    def __init__(self, runs: Iterable[Measurement]) -> None:
        self.runs = list(runs)
        self.timed = [run for run in self.runs if run.is_long_enough]

    def total(self, name: str) -> float:
        return float(sum(getattr(run.stats, name) for run in self.runs))

    @property
    def tokens_per_second(self) -> Spread | None:
        return Spread.of([run.stats.tokens_per_second for run in self.timed])

    @property
    def pooled_rate(self) -> float:
        """Total decoded tokens / total decoding seconds."""
        seconds = sum(run.stats.decode_s for run in self.timed)
        return sum(run.stats.new_tokens - 1 for run in self.timed) / seconds if seconds else 0.0

    @property
    def whole_rate(self) -> float:
        """Total tokens / total seconds, prefill included."""
        seconds = self.total("wall_s")
        return self.total("new_tokens") / seconds if seconds else 0.0

    @property
    def joules_per_token(self) -> float | None:
        known = [run.energy_j for run in self.runs if run.energy_j is not None]
        tokens = self.total("new_tokens")
        return sum(known) / tokens if tokens and len(known) == len(self.runs) else None

    def to_json(self) -> dict[str, Any]:
        spread = self.tokens_per_second
        return {
            "tokens_per_second": spread.to_json() if spread else None,
            "pooled_tokens_per_second": self.pooled_rate or None,
            "num_tokens": int(self.total("new_tokens")),
            "time": {name: self.total(name) for name in (*_TIMES, "wall_s")},
            "joules_per_token": self.joules_per_token,
        }


class Summary:
    """Statistics of `trials` (at least one). Ratios are None if there is nothing to divide by, or nothing was drafted:
    both sides decoded plainly then.
    """

    def __init__(self, trials: Iterable[Trial]) -> None:
        self.trials = list(trials)
        self.standard = Side(trial.standard for trial in self.trials)
        self.speculative = Side(trial.speculative for trial in self.trials)

    @cached_property
    def has_drafted(self) -> bool:
        return self.speculative.total("drafted_tokens") > 0

    @cached_property
    def speedups(self) -> list[float]:
        return [trial.speedup for trial in self.trials if trial.speedup is not None] if self.has_drafted else []

    @property
    def noise(self) -> Spread | None:
        """Plain decoding over itself, run twice: what a speedup of nothing looks like."""
        return Spread.of([trial.noise for trial in self.trials if trial.noise is not None])

    @property
    def speedup(self) -> Spread | None:
        return Spread.of(self.speedups)

    @property
    def pooled_speedup(self) -> float | None:
        return _ratio(self.speculative.pooled_rate, self.standard.pooled_rate) if self.has_drafted else None

    @property
    def whole_speedup(self) -> float | None:
        """Speedup of whole answers, prefill included."""
        return _ratio(self.speculative.whole_rate, self.standard.whole_rate) if self.has_drafted else None

    @property
    def acceptance_rate(self) -> float | None:
        return _ratio(self.speculative.total("accepted_tokens"), self.speculative.total("drafted_tokens"))

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per verifying target pass, the prefill's token excluded."""
        tokens = self.speculative.total("new_tokens") - len(self.trials)
        return _ratio(tokens, self.speculative.total("rounds"))

    @property
    def verdict(self) -> Verdict:
        """Whether speculation is faster: at least three quarters of the trials must agree, else "even"."""
        spread, noise = self.speedup, self.noise
        if not self.has_drafted:
            return "undrafted"
        if spread is None or len(self.speedups) < _LEAST_TRIALS:
            return "unknown"
        least = max(_NOTICEABLE, abs(noise.median - 1)) if noise is not None else _NOTICEABLE
        if spread.median > 1 + least and spread.q1 > 1:
            return "gains"
        if spread.median < 1 - least and spread.q3 < 1:
            return "loses"
        return "even"

    def to_json(self) -> dict[str, Any]:
        return {
            "num_trials": len(self.trials),
            "verdict": self.verdict,
            "speedup": self.speedup.to_json() if self.speedup else None,
            "pooled_speedup": self.pooled_speedup,
            "whole_answer_speedup": self.whole_speedup,
            "noise": self.noise.to_json() if self.noise else None,
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "standard": self.standard.to_json(),
            "speculative": self.speculative.to_json(),
        }


def median_pass_s(side: Side) -> float | None:
    """Median seconds of a target pass, prefill excluded."""
    found = [record.verify_s for run in side.runs for record in run.rounds]
    return median(found) if found else None


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None

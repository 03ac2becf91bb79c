"""The result of a benchmark: one JSON object with stable keys, and the table and reasons that are made from it.

A speedup is computed per trial, from two consecutive runs, and reported as median and quartiles. Units are seconds and
bytes. None: unknown on this machine, or nothing to divide by.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal

from rich.console import Console

from edgespec import __version__
from edgespec.bench.runner import BenchTrial, Measurement
from edgespec.config.options import GenerateOptions, Sampling
from edgespec.config.values import aligned
from edgespec.errors import ConfigError
from edgespec.platform.files import write_atomically
from edgespec.runtime import Model

FORMAT = 4
Report = dict[str, Any]
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
        low, middle, high = quantiles(values if len(values) > 1 else [*values, *values], n=4, method="inclusive")
        return Spread(middle, low, high)


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
    def acceptance_rate(self) -> float | None:
        return _ratio(self.total("accepted_tokens"), self.total("drafted_tokens"))

    def to_json(self) -> dict[str, Any]:
        spread = self.tokens_per_second
        return {
            "tokens_per_second": spread and asdict(spread),
            "pooled_tokens_per_second": self.pooled_rate or None,
            "num_tokens": int(self.total("new_tokens")),
            "time": {name: self.total(name) for name in (*_TIMES, "wall_s")},
        }


class Summary:
    """Statistics of `trials` (at least one). Ratios are None if there is nothing to divide by, or nothing was drafted:
    both sides decoded plainly then.
    """

    def __init__(self, trials: Iterable[BenchTrial]) -> None:
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
    def whole_speedup(self) -> float | None:
        """Speedup of whole answers, prefill included."""
        return _ratio(self.speculative.whole_rate, self.standard.whole_rate) if self.has_drafted else None

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
            "speedup": self.speedup and asdict(self.speedup),
            "whole_answer_speedup": self.whole_speedup,
            "noise": self.noise and asdict(self.noise),
            "acceptance_rate": self.speculative.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "standard": self.standard.to_json(),
            "speculative": self.speculative.to_json(),
        }


def describe(model: Model, sampling: Sampling, options: GenerateOptions) -> dict[str, Any]:
    """All settings that affect the result, as JSON."""
    facts = model.target.facts
    settings: tuple[tuple[object, tuple[str, ...]], ...] = (
        (facts, ("device", "threads", "context_length")),
        (model.options, ("drafter", "draft_length", "max_slowdown", "verify")),
        (model, ("reproducible",)),
        (sampling, ("temperature", "top_k", "top_p", "min_p", "seed")),
        (options, ("max_tokens", "ignore_eos")),
    )
    found = {name: getattr(owner, name) for owner, names in settings for name in names}
    return {"model": model.pair.name, "engine": facts.name} | found


def report_of(
    model: Model, sampling: Sampling, options: GenerateOptions, trials: Sequence[BenchTrial], num_planned: int
) -> Report:
    """The report of `trials`, at least one of `num_planned`; its `complete` says whether these are all."""
    by_domain: dict[str, list[BenchTrial]] = defaultdict(list)
    by_prompt: dict[int, list[BenchTrial]] = defaultdict(list)
    for trial in trials:
        by_domain[trial.task.prompt.domain].append(trial)
        by_prompt[trial.task.index].append(trial)
    return {
        "format": FORMAT,
        "edgespec": __version__,
        **describe(model, sampling, options),
        "complete": len(trials) == num_planned,
        "num_trials": len(trials),
        "num_planned_trials": num_planned,
        "num_prompts": len(by_prompt),
        "num_identical": sum(
            len({run.token_ids for trial in found for run in (trial.speculative, trial.standard)}) == 1
            for found in by_prompt.values()
        ),
        "total": Summary(trials).to_json(),
        "domains": {name: Summary(found).to_json() for name, found in by_domain.items()},
    }


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


# -- as text for a terminal: a table by domain, a verdict, and the reasons for it

HEADER = ("domain", "runs", "plain", "spec", "speedup (quartiles)", "whole", "accepted", "per pass", "")
UNKNOWN = "-"


def table_lines(report: Report) -> Iterator[str]:
    domains: dict[str, Any] = report["domains"]
    figures = domains | ({"all": report["total"]} if len(domains) > 1 else {})
    yield from aligned([HEADER, *((name, *cells(each)) for name, each in figures.items())], right=range(1, 8))
    yield (
        "plain, spec: decoding speed in tokens/s without and with speculation; whole: speedup of whole answers, "
        "prefill included; per pass: tokens per target pass"
    )
    yield ""
    yield verdict_line(report)
    if noise := report["total"]["noise"]:
        yield (
            f"noise: plain decoding, run twice, reached {noise['median']:.2f}x of itself (quartiles "
            f"{noise['q1']:.2f}-{noise['q3']:.2f}): smaller differences say nothing"
        )
    yield equality(report)
    times = report["total"]["speculative"]["time"]
    names = {"prefill_s": "prefill", "draft_s": "drafting", "verify_s": "target passes", "overhead_s": "other"}
    shares = (f"{text} {times[name] / (times['wall_s'] or 1.0):.0%}" for name, text in names.items())
    yield f"time of speculation: {', '.join(shares)}"


def cells(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a table row, without the name of the domain."""
    rates = (figures[side]["tokens_per_second"] for side in ("standard", "speculative"))
    spread, speedup = figures["speedup"], median_speedup(figures)
    if spread and figures["num_trials"] > 1:
        speedup += f" ({spread['q1']:.2f}-{spread['q3']:.2f})"
    return (
        str(figures["num_trials"]),
        *(f"{rate['median']:.1f}" if rate else UNKNOWN for rate in rates),
        speedup,
        shown(figures["whole_answer_speedup"]),
        shown(figures["acceptance_rate"], "{:.0%}"),
        shown(figures["mean_accepted_length"], "{:.2f}"),
        {"unknown": "", "undrafted": "nothing drafted"}.get(figures["verdict"], figures["verdict"]),
    )


def median_speedup(figures: Mapping[str, Any]) -> str:
    return shown(figures["speedup"] and figures["speedup"]["median"])


def shown(value: float | None, form: str = "{:.2f}x") -> str:
    return UNKNOWN if value is None else form.format(value)


def verdict_line(report: Report) -> str:
    total, domains = report["total"], report["domains"]
    median = median_speedup(total)
    says = {
        "gains": f"speculation is faster: {median} the speed of plain decoding, the median of all runs",
        "even": f"speculation makes no difference beyond noise: {median}, the median of all runs",
        "loses": f"speculation is slower: {median} the speed of plain decoding, the median of all runs",
        "undrafted": "nothing was drafted: both sides decoded plainly, so there is no ratio",
        "unknown": f"too few runs for a verdict: {median}; give more with --repeat",
    }[total["verdict"]]
    against = "gains" if total["verdict"] == "loses" else "loses"
    others = [f"{name} {median_speedup(each)}" for name, each in domains.items() if each["verdict"] == against]
    return says + (f"; it {against} on {', '.join(others)}" if others and len(domains) > 1 else "")


def equality(report: Report) -> str:
    same, count = report["num_identical"], report["num_prompts"]
    if report["reproducible"]:
        verdict = "identical to plain decoding in the same mode" if same == count else "DIFFERENT from plain decoding"
        return f"texts: {verdict}, {same} of {count} prompts"
    return f"texts: identical to plain decoding on {same} of {count} prompts; reproducible mode is off"


# -- as a picture


def check_picture(option: str, path: Path) -> None:
    """Before the work: raises ConfigError where no picture can be written at `path`."""
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"{option} {path}: the picture is an SVG file, so the name must end in .svg")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: its folder does not exist")


@contextmanager
def picture(path: Path, title: str, columns: int) -> Iterator[Console]:
    """What is printed in the block becomes an SVG image. Raises StateError when `path` cannot be written."""
    options: dict[str, Any] = {"record": True, "force_terminal": True, "color_system": "truecolor", "highlight": False}
    canvas = Console(width=columns, file=io.StringIO(), **options)
    yield canvas
    drawn = canvas.export_svg(title=title, unique_id="edgespec")
    # rich names a web font; a viewer's own monospaced one does, since every run of text carries its width
    write_atomically(path, re.sub(r"@font-face\s*\{.*?\}\s*", "", drawn, flags=re.DOTALL))

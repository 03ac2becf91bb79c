"""Every drafter and draft length on the same prompts, beside plain decoding and `auto`: `bench --sweep`.

All settings decode a prompt one after another, each on empty caches and beginning with another one for every prompt,
so that a machine that slows down meanwhile does not favour one of them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.bench.report import Side, row, shown
from edgespec.bench.runner import Measurement, Task, measure
from edgespec.config.options import GenerateOptions
from edgespec.config.values import DrafterName, DraftLength
from edgespec.runtime import Model

LENGTHS = (2, 4, 8)
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """A drafter with a draft length, as `GenerateOptions` takes them."""

    drafter: DrafterName
    length: DraftLength

    @property
    def is_fixed(self) -> bool:
        return self.length != "auto"

    def __str__(self) -> str:
        return f"{self.drafter}, {self.length}" if self.is_fixed else self.drafter


PLAIN = Choice("none", "auto")


class Sweep:
    """The measurements so far, by setting and kind of text."""

    def __init__(self, model: Model, choices: Iterable[Choice], options: GenerateOptions) -> None:
        self.model = model
        drafter: DrafterName = model.drafter_name
        self.auto = Choice(drafter, "auto")
        self.choices = list(dict.fromkeys((PLAIN, self.auto, *choices)))
        self._options = dataclasses.replace(options, logprobs=False)
        self._runs: dict[tuple[Choice, str], list[Measurement]] = defaultdict(list)

    def run(self, tasks: Sequence[Task], is_over: Callable[[], bool]) -> Iterator[tuple[Task, Choice, Measurement]]:
        """Measure every setting on every task; ends early if `is_over` returns True or a generation is cancelled."""
        for choice in self.choices:
            if is_over() or self._measure(choice, tasks[0], _WARM_UP_TOKENS) is None:
                return
        for number, task in enumerate(tasks):
            first = number % len(self.choices)
            for choice in (*self.choices[first:], *self.choices[:first]):
                measured = None if is_over() else self._measure(choice, task, self._options.max_tokens)
                if measured is None:
                    return
                self._runs[choice, task.prompt.domain].append(measured)
                yield task, choice, measured

    def _measure(self, choice: Choice, task: Task, max_tokens: int | None) -> Measurement | None:
        options = dataclasses.replace(
            self._options, drafter=choice.drafter, draft_length=choice.length, max_tokens=max_tokens
        )
        return measure(self.model, options, task)

    @property
    def domains(self) -> list[str]:
        """Those in which every setting was measured."""
        names = dict.fromkeys(domain for _, domain in self._runs)
        return [name for name in names if all((choice, name) in self._runs for choice in self.choices)]

    def side(self, choice: Choice, domain: str | None = None) -> Side:
        """All runs of a setting; of one kind of text, or of all (None)."""
        return Side(
            run for (one, name), runs in self._runs.items() if one == choice and domain in (None, name) for run in runs
        )

    def speedup(self, choice: Choice, domain: str | None = None) -> float | None:
        """Over plain decoding of the same model; None where the answers are too short."""
        plain, rate = (self.side(each, domain).pooled_rate for each in (PLAIN, choice))
        return rate / plain if plain and rate else None

    def best(self, domain: str | None = None) -> Choice | None:
        """The fastest fixed setting, plain decoding among them; None where no rate is known."""
        fixed = [choice for choice in self.choices if choice.is_fixed or choice == PLAIN]
        return max(
            (choice for choice in fixed if self.speedup(choice, domain)),
            key=lambda choice: self.speedup(choice, domain) or 0.0,
            default=None,
        )


def fixed_choices(model: Model, lengths: Sequence[int] = LENGTHS) -> list[Choice]:
    """The settings to try: every drafter of the model, or the one that it was loaded for, with each length."""
    names = model.drafter_names if model.drafter_name == "auto" else [model.drafter_name]
    widest = model.target.widest_pass
    return [Choice(name, length) for name in names for length in lengths if length < widest]


def sweep_lines(sweep: Sweep) -> Iterator[str]:
    """The best fixed setting for each kind of text beside `auto`, then the speedup of every setting over all texts."""
    widths = (15, 8, 20, 8, 8, 9)
    yield row(("domain", "plain", "best fixed setting", "speedup", "auto", "auto/best"), widths)
    for domain in (*sweep.domains, None) if len(sweep.domains) > 1 else sweep.domains:
        best = sweep.best(domain)
        if best is None:
            continue
        own, auto = sweep.speedup(best, domain), sweep.speedup(sweep.auto, domain)
        name = "plain decoding" if best == PLAIN else str(best)
        cells = f"{sweep.side(PLAIN, domain).pooled_rate:.1f}", name, _times(own), _times(auto)
        yield row((domain or "all", *cells, f"{auto / own:.2f}" if own and auto else "-"), widths)
    yield "plain: tokens/s without speculation; speedups are over it. A fixed setting was chosen on these very prompts"
    yield ""
    lengths = sorted({choice.length for choice in sweep.choices if isinstance(choice.length, int)})
    table = (15, *(7 for _ in lengths))
    yield row(("draft length", *map(str, lengths)), table)
    for drafter in dict.fromkeys(choice.drafter for choice in sweep.choices if choice.is_fixed):
        yield row((drafter, *(_times(sweep.speedup(Choice(drafter, length))) for length in lengths)), table)


def _times(value: float | None) -> str:
    return shown(value, "{:.2f}x")


def sweep_json(sweep: Sweep) -> dict[str, Any]:
    """Every setting for each kind of text, and the best one that is fixed; keys are a contract."""
    return {domain or "all": _domain_json(sweep, domain) for domain in (*sweep.domains, None)}


def _domain_json(sweep: Sweep, domain: str | None) -> dict[str, Any]:
    best = sweep.best(domain)
    return {
        "best": None if best is None else {"drafter": best.drafter, "draft_length": best.length},
        "settings": [_choice_json(sweep, choice, domain) for choice in sweep.choices],
    }


def _choice_json(sweep: Sweep, choice: Choice, domain: str | None) -> dict[str, Any]:
    side = sweep.side(choice, domain)
    drafted = side.total("drafted_tokens")
    return {
        "drafter": choice.drafter,
        "draft_length": choice.length,
        "tokens_per_second": side.pooled_rate or None,
        "speedup": sweep.speedup(choice, domain),
        "acceptance_rate": side.total("accepted_tokens") / drafted if drafted else None,
    }

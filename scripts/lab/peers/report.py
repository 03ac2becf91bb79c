"""What a run says: one row per contestant, its losses and those who could not run included."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, quantiles, stdev
from typing import Any

from peers.base import Answer
from peers.competition import Answers, Journal, show
from peers.field import Contestant

Quartiles = tuple[float, float, float]
"""Lower quartile, median, upper quartile."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant over all prompts that it answered.

    `speedup`: over its own library's plain decoding; `behind_auto` and `behind_reproducible`: how many times as fast
    edgespec's automatic decoding is on the engine it is compared with, prompt by prompt; `whole`: the first of the two
    with the reading of the prompt included. `same_text`: prompts with the text of its own plain decoding.
    """

    name: str
    is_plain: bool
    library: str
    settings: str
    prompts: int
    tokens_per_second: Quartiles
    speedup: Quartiles | None
    behind_auto: Quartiles | None
    behind_reproducible: Quartiles | None
    whole: Quartiles | None
    same_text: int
    acceptance_rate: float | None


def quartiles(values: Sequence[float]) -> Quartiles | None:
    """None without values; a single value is all three."""
    if not values:
        return None
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def make_rows(contestants: Sequence[Contestant], journal: Journal, libraries: Mapping[str, str]) -> list[Row]:
    """A row for everyone who answered at least one prompt; `libraries`: titles by child process."""
    answers = list(journal.answers.values())
    return [
        _row(contestant, answers, journal, libraries[contestant.process])
        for contestant in contestants
        if any(contestant.name in given for given in answers)
    ]


def _row(contestant: Contestant, answers: Sequence[Answers], journal: Journal, library: str) -> Row:
    mine = [given[contestant.name] for given in answers if contestant.name in given]
    speeds = quartiles([answer.tokens_per_second for answer in mine])
    assert speeds is not None
    auto = f"edgespec {contestant.engine} auto"
    return Row(
        name=contestant.name,
        is_plain=contestant.is_plain,
        library=library,
        settings=show(journal.tuned[contestant.name].settings),
        prompts=len(mine),
        tokens_per_second=speeds,
        speedup=_ratios(answers, contestant.name, contestant.plain),
        behind_auto=_ratios(answers, auto, contestant.name),
        behind_reproducible=_ratios(answers, f"{auto} reproducible", contestant.name),
        whole=_ratios(answers, auto, contestant.name, whole=True),
        same_text=sum(
            given[contestant.name].token_ids == given[contestant.plain].token_ids
            for given in answers
            if contestant.name in given and contestant.plain in given
        ),
        acceptance_rate=_acceptance(mine),
    )


def _ratios(answers: Sequence[Answers], faster: str, base: str, *, whole: bool = False) -> Quartiles | None:
    """Quartiles of one contestant's speed over another's, prompt by prompt."""
    both = [(given[faster], given[base]) for given in answers if faster in given and base in given]
    return quartiles([_speed(first, whole) / _speed(second, whole) for first, second in both if _speed(second, whole)])


def _speed(answer: Answer, whole: bool) -> float:
    return len(answer.token_ids) / answer.total_s if whole else answer.tokens_per_second


def _acceptance(answers: Sequence[Answer]) -> float | None:
    drafted = sum(answer.drafted_tokens or 0 for answer in answers)
    return sum(answer.accepted_tokens or 0 for answer in answers) / drafted if drafted else None


def table(rows: Sequence[Row], out: Mapping[str, str]) -> str:
    """A Markdown table, and a line for everyone who is out. "Accepted" is blank where nothing was drafted or told."""
    heads = ("", "tokens/s", "over its plain", "edgespec auto is", "reproducible auto is", "accepted", "same text")
    lines = [f"| {' | '.join((*heads, 'settings'))} |", "|---" * (len(heads) + 1) + "|"]
    for row in rows:
        cells = [
            row.name,
            f"{row.tokens_per_second[1]:.1f}",
            "" if row.is_plain or row.speedup is None else f"{row.speedup[1]:.2f}x",
            _spread(row.behind_auto),
            _spread(row.behind_reproducible),
            "" if row.acceptance_rate is None else f"{row.acceptance_rate:.2f}",
            "" if row.is_plain else f"{row.same_text}/{row.prompts}",
            row.settings,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- not in the race: {name}: {reason}" for name, reason in out.items())]
    return "\n".join(lines).rstrip() + "\n"


def kinds_table(rows: Sequence[Row], journal: Journal, domains: Sequence[str]) -> str:
    """A Markdown table: whole answers over the fastest plain decoding of all, by kind of prompt and contestant.

    Means of the ratios by prompt, in the last line with their standard error. Empty without prompts that all answered.
    """
    plain = [row for row in rows if row.is_plain]
    asked = {index: given for index, given in journal.answers.items() if all(row.name in given for row in rows)}
    if not plain or not asked:
        return ""
    base = max(plain, key=lambda row: mean(_speed(given[row.name], whole=True) for given in asked.values()))

    def ratios(name: str, kind: str | None) -> list[float]:
        chosen = [given for index, given in sorted(asked.items()) if kind in (None, domains[index])]
        return [_speed(given[name], whole=True) / _speed(given[base.name], whole=True) for given in chosen]

    lines = [f"Whole answers over {base.name}:", "", f"| | prompts | {' | '.join(row.name for row in rows)} |"]
    lines.append("|---" * (len(rows) + 2) + "|")
    for kind in dict.fromkeys(domains[index] for index in sorted(asked)):
        cells = [f"{mean(ratios(row.name, kind)):.2f}" for row in rows]
        lines.append(f"| {kind} | {len(ratios(base.name, kind))} | {' | '.join(cells)} |")
    cells = [_with_error(ratios(row.name, None)) for row in rows]
    return "\n".join([*lines, f"| all | {len(asked)} | {' | '.join(cells)} |"]) + "\n"


def _with_error(values: Sequence[float]) -> str:
    """The mean and its standard error, which one value does not have."""
    return f"{mean(values):.3f}" + (f" +- {stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else "")


def _spread(values: Quartiles | None) -> str:
    return "" if values is None else f"{values[1]:.2f}x ({values[0]:.2f}-{values[2]:.2f})"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {"processor": _processor(), "system": platform.platform(), "python": platform.python_version()}


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def as_json(
    rows: Sequence[Row], out: Mapping[str, str], journal: Journal, domains: Sequence[str], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything: the rows, every answer, every trial of the sweeps."""
    return {
        "about": dict(about),
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
        "out": dict(out),
        "prompts": [
            {"domain": domains[index], "answers": {name: answer.to_json() for name, answer in answers.items()}}
            for index, answers in sorted(journal.answers.items())
        ],
        "sweeps": {name: [asdict(trial) for trial in tuned.trials] for name, tuned in journal.tuned.items()},
    }

"""What was measured, one JSON object per line, and what a report says of it: losses and failures included."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from edgespec.platform.machine import processor
from peers.base import Answer
from peers.field import cores

AGAIN = " again"  # behind the name of a plain decoding that was measured twice


@dataclass(frozen=True, slots=True)
class Cell:
    """What answers are compared within: one model, temperature, number of clients and set of prompts (`prompts`)."""

    model: str
    temperature: float
    clients: int
    prompts: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One contestant's answers to the prompts that were asked at once. `prompts`: what tells them from others."""

    cell: Cell
    name: str
    prompts: str
    kind: str
    answers: list[Answer]
    peak_bytes: int | None
    load: float

    def seconds_to(self, counts: Sequence[int]) -> float:
        """Until the last client has so many tokens of its answer."""
        pairs = zip(self.answers, counts, strict=True)
        return max((answer.times_s[count - 1] for answer, count in pairs if count), default=0.0)

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def seconds(self) -> float:
        return self.seconds_to([len(answer.token_ids) for answer in self.answers])

    @property
    def texts(self) -> list[list[int]]:
        return [list(answer.token_ids) for answer in self.answers]


class Journal:
    """Sweeps, answers and failures of any number of runs, in memory and in a file that only grows.

    What a killed run left of a line is cut off.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[tuple[Cell, str, str], Entry] = {}
        self.tuned: dict[str, dict[str, Any]] = {}
        self.trials: dict[str, list[dict[str, Any]]] = {}  # of sweeps, by the key of `tuned`
        self.failed: dict[tuple[Cell, str], str] = {}
        self.titles: dict[str, str] = {}
        self.models: dict[str, Any] = {}
        self.commands: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            whole = path.read_bytes().rpartition(b"\n")[0]
            for line in whole.splitlines():
                self._take(json.loads(line))
            path.write_bytes(whole + b"\n" if whole else b"")

    def add(self, what: str, **values: Any) -> None:
        """`what`: answer, trial, tuned, failed, title, model or command; values as `_take` reads them."""
        record = {"what": what, **values}
        with self._path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(record) + "\n")
        self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        what = record.pop("what")
        if what == "answer":
            cell, answers = Cell(*record.pop("cell")), [Answer(**each) for each in record.pop("answers")]
            entry = Entry(cell=cell, answers=answers, **record)
            self.entries[cell, entry.name, entry.prompts] = entry
            self.failed.pop((cell, entry.name), None)
        elif what == "tuned":
            self.tuned[record["key"]] = record
            again = {each: why for each, why in self.failed.items() if tuned_key(*each) != record["key"]}
            self.failed = again  # an earlier run could not
        elif what == "failed":
            self.failed[Cell(*record["cell"]), record["name"]] = record["reason"]
        elif what == "trial":
            self.trials.setdefault(record["key"], []).append(record["trial"])
        elif what == "command":
            self.commands.append(record["text"])
        else:
            value = record["files" if what == "model" else "title"]
            (self.models if what == "model" else self.titles)[record["name"]] = value

    @property
    def cells(self) -> list[Cell]:
        """All that were measured or tried, in this order."""
        return list(dict.fromkeys([*(key[0] for key in self.entries), *(key[0] for key in self.failed)]))


# -- Ratios


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant of a cell. Ratios are of time, above 1 is faster, by prompt (or prompts asked at once).

    `by_kind`: over the fastest plain decoding of the other runtimes, by kind of prompt; `over_own`: over its own
    runtime's. `same_text`: prompts with the text of its own plain decoding, of `compared`.
    """

    name: str
    entries: list[Entry]
    by_kind: dict[str, list[float]]
    over_own: list[float]
    same_text: int
    compared: int

    @property
    def over_base(self) -> list[float]:
        return [each for found in self.by_kind.values() for each in found]

    def cells(self, settings: Mapping[str, Any]) -> list[str]:
        """Of the report's table."""
        chosen = ", ".join(
            f"{key} {value}" for key, value in settings.items() if key != "setting" and value is not None
        )
        rate = sum(entry.tokens for entry in self.entries) / max(sum(entry.seconds for entry in self.entries), 1e-9)
        peak = max((entry.peak_bytes for entry in self.entries if entry.peak_bytes is not None), default=None)
        own = ["", ""]
        if not self.name.removesuffix(AGAIN).endswith(" plain"):
            own = [with_error(self.over_own), f"{self.same_text} of {self.compared}"]
        worst = f"{min(self.over_base):.2f}" if self.over_base else ""
        found = [self.name, f"{len(self.over_base)}", with_error(self.over_base), worst, own[0], f"{rate:.1f}", own[1]]
        return [*found, "" if peak is None else f"{peak / 1e6:.0f}", chosen]


def ratio(entry: Entry, bases: Sequence[Entry]) -> float | None:
    """How many times as fast as the mean of `bases`, to the last token of the shortest answer of all; None of none.

    Of several clients the tokens per second of all, since a longer answer delays those behind it.
    """
    if entry.cell.clients > 1:
        tokens = mean(base.tokens / base.seconds for base in bases)
        return entry.tokens / entry.seconds / tokens if entry.seconds and tokens else None
    lengths = [[len(answer.token_ids) for answer in each.answers] for each in (entry, *bases)]
    counts = [min(each) for each in zip(*lengths, strict=True)]
    seconds = entry.seconds_to(counts)
    return mean(base.seconds_to(counts) for base in bases) / seconds if seconds else None


def rows_of(cell: Cell, journal: Journal) -> tuple[str, list[Row]]:
    """The name of the fastest plain decoding of the others, and a row of every contestant, "again" included."""
    asked: dict[str, dict[str, Entry]] = {}
    for (where, name, prompts), entry in journal.entries.items():
        if where == cell:
            asked.setdefault(name, {})[prompts] = entry
    base = _fastest(asked)
    rows = [_row(name, asked, base) for name in sorted(asked, key=lambda name: (not name.startswith("edgespec"), name))]
    return base, rows


def _fastest(asked: Mapping[str, Mapping[str, Entry]]) -> str:
    """Of the other runtimes' plain decodings, by their rates over the prompts that all of them answered."""
    plain = [name for name in asked if name.endswith(" plain") and not name.startswith("edgespec")]
    plain = plain or [name for name in asked if name.endswith(" plain")]
    common = set.intersection(*(set(asked[name]) for name in plain)) if plain else set()
    if not common:
        return plain[0] if plain else ""

    def rate(name: str) -> float:
        return mean(asked[name][key].tokens / max(asked[name][key].seconds, 1e-9) for key in common)

    return max(plain, key=rate)


def _row(name: str, asked: Mapping[str, Mapping[str, Entry]], base: str) -> Row:
    mine, own = asked[name], asked.get(f"{name.split(' ', 1)[0]} plain", {})
    by_kind: dict[str, list[float]] = {}
    for key, entry in mine.items():
        bases = [asked[each][key] for each in (base, base + AGAIN) if key in asked.get(each, {}) and each != name]
        bases = [entry] if name == base else bases[:1] if name == base + AGAIN else bases
        if bases and (found := ratio(entry, bases)) is not None:
            by_kind.setdefault(entry.kind, []).append(found)
    compared = [(entry, own[key]) for key, entry in mine.items() if key in own]
    over_own = [each for entry, plain in compared if (each := ratio(entry, [plain])) is not None]
    same_text = sum(entry.texts == plain.texts for entry, plain in compared)
    return Row(name, [*mine.values()], by_kind, over_own, same_text, len(compared))


# -- Text


def markdown(journal: Journal) -> str:
    """The whole report, with the commands that repeat it."""
    loads = [entry.load for entry in journal.entries.values()] or [0.0]
    lines = [f"{processor()}, {cores()} cores; load average while measuring {min(loads):.1f} to {max(loads):.1f}.", ""]
    lines += [f"- {title}" for title in sorted(set(journal.titles.values()))]
    for cell in journal.cells:
        lines += ["", *_section(cell, journal)]
    return "\n".join([*lines, "", "```sh", *dict.fromkeys(journal.commands), "```"]) + "\n"


HEAD = "| | prompts | over {} | worst | over its own plain | tokens/s | same text | peak MB | settings |"


def _section(cell: Cell, journal: Journal) -> list[str]:
    base, rows = rows_of(cell, journal)
    clients = "one client" if cell.clients == 1 else f"{cell.clients} clients at once"
    lines = [f"## {cell.model}, {cell.prompts}, temperature {cell.temperature:g}, {clients}", "", HEAD.format(base)]
    lines.append("|---" * 9 + "|")
    for row in rows:
        tuned = journal.tuned.get(tuned_key(cell, row.name.removesuffix(AGAIN)), {}).get("settings", {})
        lines.append(f"| {' | '.join(row.cells(tuned))} |")
    lines += [f"- not in the table: {name}: {why}" for (where, name), why in journal.failed.items() if where == cell]
    kinds = sorted({kind for row in rows for kind in row.by_kind})
    if cell.clients == 1 and len(kinds) > 1:
        lines += ["", f"By kind of prompt, mean over {base} (worst):", ""]
        lines += [f"| | {' | '.join(row.name for row in rows)} |", "|---" * (len(rows) + 1) + "|"]
        for kind in kinds:
            found = [row.by_kind.get(kind, []) for row in rows]
            lines.append(f"| {kind} | {' | '.join(f'{mean(x):.2f} ({min(x):.2f})' if x else '' for x in found)} |")
    return lines


def tuned_key(cell: Cell, name: str) -> str:
    """Settings are swept once for a model and a number of clients, at whatever temperature comes first."""
    return f"{cell.model}|{cell.clients}|{name}"


def with_error(values: Sequence[float]) -> str:
    """The mean and its standard error, which one value does not have."""
    if not values:
        return ""
    return f"{mean(values):.2f}" + (f" +- {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else "")

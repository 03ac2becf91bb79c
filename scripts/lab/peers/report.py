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
            for cell, name in [each for each in self.failed if tuned_key(*each) == record["key"]]:
                del self.failed[cell, name]  # an earlier run could not
        elif what == "failed":
            self.failed[Cell(*record["cell"]), record["name"]] = record["reason"]
        elif what == "trial":
            self.trials.setdefault(record["key"], []).append(record["trial"])
        elif what == "model":
            self.models[record["name"]] = record["files"]
        elif what == "command":
            self.commands.append(record["text"])
        else:
            self.titles[record["name"]] = record["title"]

    @property
    def cells(self) -> list[Cell]:
        """All that were measured or tried, in this order."""
        return list(dict.fromkeys([*(key[0] for key in self.entries), *(key[0] for key in self.failed)]))


# -- Ratios


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant of a cell. Ratios are of time, above 1 is faster, by prompt (or prompts asked at once).

    `over_base`: over the fastest plain decoding of the other runtimes; `over_own`: over its own runtime's. `same_text`:
    prompts with the text of its own plain decoding, of `compared`.
    """

    name: str
    over_base: list[float]
    over_own: list[float]
    tokens_per_second: float
    same_text: int
    compared: int
    peak_bytes: int | None
    by_kind: dict[str, list[float]]


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
    mine = asked[name]
    runtime = name.split(" ", 1)[0]
    own = asked.get(f"{runtime} plain", {})
    by_kind: dict[str, list[float]] = {}
    for key, entry in mine.items():
        bases = [asked[each][key] for each in (base, base + AGAIN) if key in asked.get(each, {}) and each != name]
        if name == base:
            bases = [entry]
        if name == base + AGAIN:
            bases = bases[:1]
        found = ratio(entry, bases) if bases else None
        if found is not None:
            by_kind.setdefault(entry.kind, []).append(found)
    compared = [(entry, own[key]) for key, entry in mine.items() if key in own]
    over_own = [ratio(entry, [plain]) for entry, plain in compared]
    peaks = [entry.peak_bytes for entry in mine.values() if entry.peak_bytes is not None]
    return Row(
        name=name,
        over_base=[each for found in by_kind.values() for each in found],
        over_own=[each for each in over_own if each is not None],
        tokens_per_second=sum(e.tokens for e in mine.values()) / max(sum(e.seconds for e in mine.values()), 1e-9),
        same_text=sum(entry.texts == plain.texts for entry, plain in compared),
        compared=len(compared),
        peak_bytes=max(peaks, default=None),
        by_kind=by_kind,
    )


# -- Text


def markdown(journal: Journal) -> str:
    """The whole report, with the commands that repeat it."""
    loads = [entry.load for entry in journal.entries.values()] or [0.0]
    lines = [f"{processor()}, {cores()} cores; load average while measuring {min(loads):.1f} to {max(loads):.1f}.", ""]
    lines += [f"- {title}" for title in sorted(set(journal.titles.values()))]
    for cell in journal.cells:
        lines += ["", *_section(cell, journal)]
    return "\n".join([*lines, "", "```sh", *dict.fromkeys(journal.commands), "```"]) + "\n"


def _section(cell: Cell, journal: Journal) -> list[str]:
    base, rows = rows_of(cell, journal)
    clients = "one client" if cell.clients == 1 else f"{cell.clients} clients at once"
    lines = [f"## {cell.model}, {cell.prompts}, temperature {cell.temperature:g}, {clients}", ""]
    lines += [f"| | prompts | over {base} | worst | over its own plain | tokens/s | same text | peak MB | settings |"]
    lines.append("|---" * 9 + "|")
    for row in rows:
        tuned = journal.tuned.get(tuned_key(cell, row.name.removesuffix(AGAIN)), {}).get("settings", {})
        chosen = ", ".join(f"{key} {value}" for key, value in tuned.items() if key != "setting" and value is not None)
        is_plain = row.name.removesuffix(AGAIN).endswith(" plain")
        lines.append(
            f"| {row.name} | {len(row.over_base)} | {with_error(row.over_base)} | {_worst(row.over_base)} | "
            f"{'' if is_plain else with_error(row.over_own)} | {row.tokens_per_second:.1f} | "
            f"{'' if is_plain else f'{row.same_text} of {row.compared}'} | "
            f"{'' if row.peak_bytes is None else f'{row.peak_bytes / 1e6:.0f}'} | {chosen} |"
        )
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


def _worst(values: Sequence[float]) -> str:
    return f"{min(values):.2f}" if values else ""

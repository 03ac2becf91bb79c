"""`edgespec race`: plain and speculative decoding of one prompt, side by side: a benchmark of one trial.

Run at the same time, the two would slow each other down; alternating token by token, they would share caches. So each
side runs alone: the plain one comes first, and is shown again beside the other by the same clock.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from threading import Event
from time import perf_counter, sleep
from typing import Any, NamedTuple

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from edgespec.bench.report import Report, Summary, check_picture, equality, picture, report_of
from edgespec.bench.runner import BenchTrial, Task, run_trials
from edgespec.bench.sweep import costs_of, reasons
from edgespec.cli import FilePath, printable
from edgespec.cli.main import FAILED, INTERRUPTED
from edgespec.cli.options import SettingsCommand, resolve_settings, settings_options
from edgespec.cli.run import encode_prompt, read_prompt
from edgespec.cli.session import Session, open_measured
from edgespec.cli.terminal import note, stops
from edgespec.config.options import PRINTING, REMEMBERING, STRUCTURE
from edgespec.loading.drafts import PROMPTS, Prompt
from edgespec.reports import TokenEvent

DEFAULT_TOKENS = 128
FRAMES_PER_SECOND = 12
COLOURS = {None: "", "model": "cyan", "ngram": "yellow", "suffix": "magenta"}
OTHER_COLOUR = "green"
SVG_COLUMNS = 96
_FRAME_LINES, _FRAME_COLUMNS = 2, 4  # what a panel's border takes
HOW = "each side runs alone, so that neither slows the other; the left one ran first and is replayed by the same clock"


@click.command(cls=SettingsCommand)
@settings_options("load", "generate", "sampling", "session", leave_out=(*STRUCTURE, *PRINTING, *REMEMBERING))
@click.option("-p", "--prompt", metavar="TEXT|-", help="The prompt; - reads it from standard input.")
@click.option("--svg", "path", type=FilePath(), metavar="FILE", help="Draw the finish as an image.")
def command(
    model_name: str | None, config_file: Path | None, prompt: str | None, path: Path | None, **given: Any
) -> int:
    """Decode one prompt plainly and with speculation, side by side, and say why one of them is faster.

    MODEL is a registry name or the path of a model; the demo model is so small that speculation gains little. Exit code
    1 when the texts differ in reproducible mode.
    """
    settings = resolve_settings(given, model_name, config_file)
    if path is not None:
        check_picture("--svg", path)
    text = PROMPTS[0].text if prompt is None else read_prompt(prompt)
    session = open_measured(settings, "race", {"max_tokens": DEFAULT_TOKENS})
    with session.model as model:
        task = Task(Prompt("race", text), tuple(encode_prompt(session, text)), session.sampling)
        model.stream(task.prompt_ids, session.sampling, session.options)  # checks the prompt; nothing runs
        return _race(session, task, path)


def _race(session: Session, task: Task, path: Path | None) -> int:
    console, model = Console(highlight=False), session.model
    laps = {"standard": Lap("plain"), "speculative": Lap("speculative")}
    head = f"{model.pair.name} on {model.target.facts.name}, seed {session.seed}"
    is_live = sys.stdout.isatty() and not console.is_dumb_terminal
    live = Live(console=console, screen=True, auto_refresh=False) if is_live else None
    if live is not None:
        note("warming up")
    with stops(model.cancel) as interruption, live or nullcontext():
        screen = None if live is None else _Screen(laps, head, live)

        def on_token(side: str, event: TokenEvent, at_s: float) -> None:
            if side in laps:
                laps[side].marks.append(Mark(event, at_s))
                if screen is not None:
                    screen.show(side, at_s)

        trial = next(run_trials(model, session.options, [task], interruption.is_set, on_token), None)
        for lap in laps.values():
            lap.is_done = trial is not None
        if trial is not None and screen is not None:
            screen.replay(interruption)
    if trial is None:
        note("stopped before the end, so there is no result")
        return INTERRUPTED
    report = report_of(model, session.sampling, session.options, [trial], 1)
    lines = [Text(line) for line in result_lines(session, trial, report)]
    lines[0].stylize("bold")
    console.print(panels(list(laps.values()), inf, console.width))
    for line in lines:
        console.print(line, soft_wrap=not is_live)
    if path is not None:
        first = min(laps.values(), key=lambda lap: lap.end_s)
        with picture(path, f"edgespec race, the moment {first.name} is done", SVG_COLUMNS) as canvas:
            canvas.print(panels(list(laps.values()), first.end_s, SVG_COLUMNS), *lines, sep="\n")
        note(f"drew {path}")
    if interruption.is_set():
        return INTERRUPTED
    differs = report["reproducible"] and report["num_identical"] < report["num_prompts"]
    return FAILED if differs else 0


def result_lines(session: Session, trial: BenchTrial, report: Report) -> Iterator[str]:
    """Which side was faster, whether the texts are the same, and why; the first line is the result."""
    plain, drafted = (side.stats.tokens_per_second for side in (trial.standard, trial.speculative))
    summary = Summary([trial])
    ratio = "no ratio: nothing was drafted, or too few tokens"
    if trial.speedup and summary.has_drafted:
        ratio = f"{trial.speedup:.2f}x"
    yield f"{ratio}: {drafted:.1f} tokens/s with speculation, {plain:.1f} without"
    yield equality(report)
    if (costs := costs_of(session.model, summary.standard, summary.speculative)) is not None:
        yield from reasons(costs, summary.standard, summary.speculative)
    if trial.noise is not None:
        yield f"noise: plain decoding, run twice, reached {trial.noise:.2f}x of itself"


# -- what is seen


class Mark(NamedTuple):
    """One token, and the seconds on its run's own clock when it came; the clock starts with the prompt."""

    event: TokenEvent
    at_s: float


@dataclass(slots=True)
class Lap:
    """One side as it was recorded; grows while it runs."""

    name: str
    marks: list[Mark] = field(default_factory=list)
    is_done: bool = False

    @property
    def end_s(self) -> float:
        return self.marks[-1].at_s if self.marks else 0.0

    def seen_at(self, clock_s: float) -> Sequence[Mark]:
        return self.marks[: bisect_right(self.marks, clock_s, key=lambda mark: mark.at_s)]

    def figures(self, clock_s: float) -> str:
        marks = self.seen_at(clock_s)
        if len(marks) < 2:
            return ""
        rate = (len(marks) - 1) / max(marks[-1].at_s - marks[0].at_s, 1e-9)
        return f"{rate:.1f} tokens/s, {len(marks)} in {marks[-1].at_s:.2f} s"


class _Screen:
    """Draws both sides at a moment of their clocks, no more often than eyes can use."""

    def __init__(self, laps: dict[str, Lap], head: str, live: Live) -> None:
        self._laps, self._live = laps, live
        self._edge = [Text(line, style="dim", overflow="fold") for line in (head, HOW)]
        self._drawn_s = 0.0

    def show(self, side: str, clock_s: float, *, is_due: bool = False) -> None:
        if perf_counter() - self._drawn_s < 1 / FRAMES_PER_SECOND and not is_due:
            return
        shown = [self._laps["standard"]] if side == "standard" else list(self._laps.values())
        console = self._live.console
        rows = console.height - sum(len(text.wrap(console, console.width)) for text in self._edge) - 1
        drawn = panels(shown, clock_s, console.width, max(rows - _FRAME_LINES, 1))
        self._live.update(Group(self._edge[0], drawn, self._edge[1]), refresh=True)
        self._drawn_s = perf_counter()

    def replay(self, interruption: Event) -> None:
        """The rest of the recorded plain side at its own speed; Ctrl-C goes on to the result."""
        clock_s, begun_s = self._laps["speculative"].end_s, perf_counter()
        while clock_s < self._laps["standard"].end_s and not interruption.is_set():
            self.show("speculative", clock_s, is_due=True)
            sleep(1 / FRAMES_PER_SECOND)
            clock_s = self._laps["speculative"].end_s + perf_counter() - begun_s


def panels(laps: Sequence[Lap], clock_s: float, width: int, lines: int = 0) -> RenderableType:
    """Both sides at that moment, each with the last `lines` of its text (0: all of it), and what the colours mean."""
    columns = max(width // len(laps) - _FRAME_COLUMNS, 1)
    texts = [coloured(lap.seen_at(clock_s)).wrap(Console(width=width), columns) for lap in laps]
    lines = lines or max(1, *map(len, texts))
    drawn = [
        Panel(
            Text("\n").join(wrapped[-lines:]),
            title=lap.name,
            subtitle=lap.figures(clock_s),
            border_style="green" if lap.is_done and clock_s >= lap.end_s else "dim",
            height=lines + _FRAME_LINES,
        )
        for lap, wrapped in zip(laps, texts, strict=True)
    ]
    grid = Table.grid(expand=True)
    for _ in drawn:
        grid.add_column(ratio=1)
    grid.add_row(*drawn)
    return Group(grid, legend(laps[-1].seen_at(clock_s)))


def legend(marks: Sequence[Mark]) -> Text:
    """Which colour stands for whom, and how many tokens were whose."""
    counts = Counter(mark.event.drafter for mark in marks)
    line = Text(f"tokens: {counts.pop(None, 0)} the target's own", style="dim", no_wrap=True, overflow="ellipsis")
    for name, count in counts.most_common():
        line.append(", ")
        line.append(f"{count} drafted by {name}", style=f"not dim {COLOURS.get(name, OTHER_COLOUR)}")
    return line


def coloured(marks: Sequence[Mark]) -> Text:
    """The text of tokens, each in its drafter's colour."""
    text = Text(overflow="fold")
    for mark in marks:
        text.append(printable(mark.event.text), style=COLOURS.get(mark.event.drafter, OTHER_COLOUR))
    return text

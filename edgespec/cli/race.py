"""`edgespec race`: plain and speculative decoding of one prompt, side by side: a benchmark of one trial.

Run at the same time, the two would slow each other down; alternating token by token, they would share caches. So each
side runs alone: the plain one comes first, and is shown again beside the other by the same clock.
"""

from __future__ import annotations

import io
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from edgespec.bench.plot import check_picture
from edgespec.bench.prompts import BenchPrompt
from edgespec.bench.report import Report, Summary, equality, report_of
from edgespec.bench.runner import Runner, Task, Trial
from edgespec.bench.sweep import balance, changes, costs_of, threshold, typical_width
from edgespec.cli import FilePath, printable
from edgespec.cli.main import FAILED, INTERRUPTED
from edgespec.cli.options import SettingsCommand, require_speculation, resolve_settings, settings_options
from edgespec.cli.run import encode_prompt, read_prompt
from edgespec.cli.session import Session, open_session, show_configuration
from edgespec.cli.terminal import Interruption, note, stops
from edgespec.config.options import PRINTING, REMEMBERING, STRUCTURE
from edgespec.loading.drafts import PROMPTS
from edgespec.platform.files import write_atomically
from edgespec.reports import TokenEvent

DEFAULT_TOKENS = 128
FRAMES_PER_SECOND = 12
COLOURS = {"model": "cyan", "ngram": "yellow", "suffix": "magenta"}
OTHER_COLOUR = "green"
SVG_COLUMNS = 96
_FRAME_LINES, _FRAME_COLUMNS = 2, 4  # what a panel's border takes
HOW = "each side runs alone, so that neither slows the other; the left one ran first and is replayed by the same clock"


@click.command(cls=SettingsCommand, short_help="Plain and speculative decoding of one prompt, side by side.")
@settings_options("load", "generate", "sampling", "session", leave_out=(*STRUCTURE, *PRINTING, *REMEMBERING))
@click.option("-p", "--prompt", metavar="TEXT|-", help="The prompt; - reads it from standard input.")
@click.option("--svg", "picture", type=FilePath(), metavar="FILE", help="Draw the finish as an image.")
def command(
    model_name: str | None, config_file: Path | None, prompt: str | None, picture: Path | None, **given: Any
) -> int:
    """Decode one prompt plainly and with speculation, side by side, and say why one of them is faster.

    MODEL is a registry name or the path of a model; the demo model is so small that speculation gains little. Exit code
    1 when the texts differ in reproducible mode.
    """
    settings = resolve_settings(given, model_name, config_file)
    require_speculation(settings, "race")
    if picture is not None:
        check_picture("--svg", picture)
    text = PROMPTS[0].text if prompt is None else read_prompt(prompt)
    session = open_session(settings.below({"max_tokens": DEFAULT_TOKENS}, "race"))
    with session.model as model:
        task = Task(BenchPrompt("race", text), tuple(encode_prompt(session, text)), session.sampling)
        model.stream(task.prompt_ids, session.sampling, session.options)  # checks the prompt; nothing runs
        show_configuration(session)
        return _race(session, task, picture)


def _race(session: Session, task: Task, picture: Path | None) -> int:
    console, model = Console(highlight=False), session.model
    is_live = sys.stdout.isatty() and not console.is_dumb_terminal
    laps = {"standard": Lap("plain"), "speculative": Lap("speculative")}
    head = f"{model.pair.name} on {model.target.facts.name}, seed {session.sampling.seed}"
    live = Live(console=console, screen=True, auto_refresh=False) if is_live else None
    if live is not None:
        note("warming up")
    with stops(model.cancel) as interruption, live or nullcontext():
        screen = _Screen(laps, head, live)

        def on_token(side: str, event: TokenEvent, at_s: float) -> None:
            if side in laps:
                laps[side].marks.append(Mark(event, at_s))
                screen.show(side, at_s)

        runner = Runner(model, session.options, lambda: interruption.happened, on_token)
        trial = next(iter(runner.run([task])), None)
        if trial is not None:
            for lap in laps.values():
                lap.is_done = True
            screen.replay(interruption)
    if trial is None:
        note("stopped before the end, so there is no result")
        return INTERRUPTED
    report = report_of(model, session.sampling, session.options, [trial], 1)
    lines = result_lines(session, trial, report)
    if is_live:
        console.print(panels(list(laps.values()), float("inf"), console))
        for number, line in enumerate(lines):
            console.print(Text(line, style="bold" if not number else ""))
    else:
        _print_plainly(laps, lines)
    if picture is not None:
        _draw(laps, lines, picture)
    if interruption.happened:
        return INTERRUPTED
    differs = report["reproducible"] and report["num_identical"] < report["num_prompts"]
    return FAILED if differs else 0


def result_lines(session: Session, trial: Trial, report: Report) -> list[str]:
    """Which side was faster, whether the texts are the same, and why; the first line is the result."""
    plain, drafted = (side.stats.tokens_per_second for side in (trial.standard, trial.speculative))
    summary = Summary([trial])
    if not trial.speedup:
        return ["too few tokens to compare speeds: give a larger -n", equality(report)]
    lines = [f"{trial.speedup:.2f}x: {drafted:.1f} tokens/s with speculation, {plain:.1f} without"]
    if not summary.has_drafted:
        rates = f"{plain:.1f} and {drafted:.1f} tokens/s"
        lines = [f"no ratio: nothing was drafted, so both sides decoded plainly ({rates})"]
    lines.append(equality(report))
    if summary.has_drafted:
        lines.append(balance(summary.standard, summary.speculative))
    costs = costs_of(session.model, summary.standard, summary.speculative)
    if costs is None:
        lines.append("this model cannot roll back its KV cache, so speculation is impossible")
    else:
        lines.append(threshold(costs, typical_width(summary.speculative)))
        lines += [changes(costs)] if summary.has_drafted else []
    if trial.noise is not None:
        lines.append(f"noise: plain decoding, run twice, reached {trial.noise:.2f}x of itself")
    return lines


def _print_plainly(laps: dict[str, Lap], lines: list[str]) -> None:
    """Both texts, once where they are the same, then the result."""
    plain, drafted = laps.values()
    is_same = [mark.event.token_id for mark in plain.marks] == [mark.event.token_id for mark in drafted.marks]
    shown = [("plain and speculative", plain)] if is_same else [(lap.name, lap) for lap in (plain, drafted)]
    for name, lap in shown:
        click.echo(f"--- {name}, {len(lap.marks)} tokens")
        click.echo(lap.text.removesuffix("\n"))
        click.echo("---")
    for line in lines:
        click.echo(line)


# -- what is seen


@dataclass(frozen=True, slots=True)
class Mark:
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
    def text(self) -> str:
        return "".join(mark.event.text for mark in self.marks)

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
    """Draws both sides at a moment of their clocks, no more often than eyes can use; nothing without a terminal."""

    def __init__(self, laps: dict[str, Lap], head: str, live: Live | None) -> None:
        self._laps, self._head, self._live = laps, head, live
        self._drawn_s = 0.0

    def show(self, side: str, clock_s: float, *, is_due: bool = False) -> None:
        if self._live is None or (perf_counter() - self._drawn_s < 1 / FRAMES_PER_SECOND and not is_due):
            return
        shown = [self._laps["standard"]] if side == "standard" else list(self._laps.values())
        console = self._live.console
        edge = [Text(line, style="dim", overflow="fold") for line in (self._head, HOW)]
        rows = console.height - sum(len(text.wrap(console, console.width)) for text in edge) - 1
        drawn = panels(shown, clock_s, console, max(rows - _FRAME_LINES, 1))
        self._live.update(Group(edge[0], drawn, edge[1]), refresh=True)
        self._drawn_s = perf_counter()

    def replay(self, interruption: Interruption) -> None:
        """The rest of the recorded plain side at its own speed; Ctrl-C goes on to the result."""
        if self._live is None:
            return
        began_s, start_s = perf_counter(), self._laps["speculative"].end_s
        clock_s = start_s
        while clock_s < self._laps["standard"].end_s and not interruption.happened:
            self.show("speculative", clock_s, is_due=True)
            sleep(1 / FRAMES_PER_SECOND)
            clock_s = start_s + perf_counter() - began_s


def panels(laps: Sequence[Lap], clock_s: float, console: Console, lines: int = 0) -> RenderableType:
    """Both sides at that moment, each with the last `lines` of its text (0: all of it), and what the colours mean."""
    columns = max(console.width // len(laps) - _FRAME_COLUMNS, 1)
    texts = [coloured(lap.seen_at(clock_s)).wrap(console, columns) for lap in laps]
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
        line.append(f"{count} drafted by {name}", style=f"not dim {_colour_of(name)}")
    return line


def _colour_of(drafter: str | None) -> str:
    return "" if drafter is None else COLOURS.get(drafter, OTHER_COLOUR)


def coloured(marks: Sequence[Mark]) -> Text:
    """The text of tokens, each in its drafter's colour."""
    text = Text(overflow="fold")
    for mark in marks:
        text.append(printable(mark.event.text), style=_colour_of(mark.event.drafter))
    return text


def _draw(laps: dict[str, Lap], lines: list[str], path: Path) -> None:
    """An SVG image of the moment at which the first side was done, with the result under it. Raises StateError."""
    first = min(laps.values(), key=lambda lap: lap.end_s)
    silent = io.StringIO()
    options: dict[str, Any] = {"record": True, "force_terminal": True, "color_system": "truecolor", "highlight": False}
    canvas = Console(width=SVG_COLUMNS, file=silent, **options)
    canvas.print(panels(list(laps.values()), first.end_s, canvas))
    canvas.print(Group(*(Text(line, style="bold" if line is lines[0] else "") for line in lines)))
    drawn = canvas.export_svg(title=f"edgespec race, the moment {first.name} is done", unique_id="race")
    # rich names a web font; a viewer's own monospaced one does, since every run of text carries its width
    write_atomically(path, re.sub(r"@font-face\s*\{.*?\}\s*", "", drawn, flags=re.DOTALL))
    note(f"drew {path}")

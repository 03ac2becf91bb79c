"""How a race looks: two panels of text, each token in the colour of who drafted it, beside each other or stacked."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from edgespec.bench.race import Lap, Mark
from edgespec.cli import printable
from edgespec.platform.files import write_atomically

COLOURS = {"model": "cyan", "ngram": "yellow", "suffix": "magenta", "cache": "blue"}
OTHER_COLOUR = "green"
SIDE_BY_SIDE = 64  # columns from which two panels stand beside each other
_FRAME_LINES, _FRAME_COLUMNS = 2, 4  # what a panel's border takes
SVG_COLUMNS = 96


@dataclass(frozen=True, slots=True)
class Side:
    """One panel: what is shown of a lap at a moment of its own clock. `state` stands where the rate is not yet."""

    name: str
    lap: Lap
    clock_s: float
    state: str = ""

    @property
    def marks(self) -> Sequence[Mark]:
        return self.lap.seen_at(self.clock_s)

    @property
    def is_over(self) -> bool:
        return self.lap.is_over and self.clock_s >= self.lap.stats.wall_s

    def figures(self) -> str:
        marks = self.marks
        if not marks:
            return self.state
        seconds = self.lap.stats.wall_s if self.is_over else self.clock_s
        rate = self.lap.stats.tokens_per_second if self.is_over else self.lap.rate_of(marks)
        return f"{rate:.1f} tokens/s, {len(marks)} in {seconds:.2f} s"


def frame(sides: Sequence[Side], head: str, foot: str, console: Console) -> RenderableType:
    """One picture that fits the console: of a longer text, the end."""
    edge = [Text(line, style="dim", overflow="fold") for line in (head, foot)]
    used = sum(len(text.wrap(console, console.width)) for text in edge) + 1
    rows = console.height - used
    lines = max((rows if _is_wide(console) else rows // 2) - _FRAME_LINES, 1)
    return Group(edge[0], _panels(sides, console, lines), legend(sides), edge[1])


def result(sides: Sequence[Side], console: Console) -> RenderableType:
    """A picture with the whole texts, whatever its height."""
    lines = max(len(coloured(side.marks).wrap(console, _columns(console))) for side in sides)
    return Group(_panels(sides, console, max(lines, 1)), legend(sides))


def legend(sides: Sequence[Side]) -> Text:
    """Which colour stands for whom, and how many tokens were whose, on the last side."""
    counts = Counter(mark.event.drafter for mark in sides[-1].marks)
    line = Text("tokens: ", style="dim", no_wrap=True, overflow="ellipsis")
    line.append(f"{counts.pop(None, 0)} the target's own")
    for name, count in counts.most_common():
        line.append(", ")
        line.append(f"{count} drafted by {name}", style=f"not dim {colour_of(name)}")
    return line


def colour_of(drafter: str | None) -> str:
    return "" if drafter is None else COLOURS.get(drafter, OTHER_COLOUR)


def coloured(marks: Sequence[Mark]) -> Text:
    """The text of tokens, each in its drafter's colour."""
    text = Text(overflow="fold")
    for mark in marks:
        text.append(printable(mark.event.text), style=colour_of(mark.event.drafter))
    return text


def svg(picture: Console, path: Path, title: str) -> None:
    """Write what a recording console has shown as an SVG image that needs nothing from elsewhere.

    Raises StateError when that fails.
    """
    drawn = picture.export_svg(title=title, unique_id="race")
    # rich names a web font; a viewer's own monospaced one does, since every run of text carries its width
    drawn = re.sub(r"@font-face\s*\{.*?\}\s*", "", drawn, flags=re.DOTALL)
    write_atomically(path, drawn)


def recorder() -> Console:
    """A console that shows nothing and remembers all, for `svg`."""
    silent = io.StringIO()
    return Console(
        record=True, width=SVG_COLUMNS, file=silent, force_terminal=True, color_system="truecolor", highlight=False
    )


def _is_wide(console: Console) -> bool:
    return console.width >= SIDE_BY_SIDE


def _columns(console: Console) -> int:
    """Columns of text inside a panel."""
    return max((console.width // 2 if _is_wide(console) else console.width) - _FRAME_COLUMNS, 1)


def _panels(sides: Sequence[Side], console: Console, lines: int) -> RenderableType:
    panels = [_panel(side, console, lines) for side in sides]
    if not _is_wide(console):
        return Group(*panels)
    grid = Table.grid(expand=True)
    for _ in sides:
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _panel(side: Side, console: Console, lines: int) -> Panel:
    """`lines`: how many of text there is room for."""
    wrapped = coloured(side.marks).wrap(console, _columns(console))
    return Panel(
        Text("\n").join(wrapped[-lines:]),
        title=side.name,
        subtitle=side.figures(),
        border_style="green" if side.is_over else "dim",
        height=lines + _FRAME_LINES,
    )

"""The picture of a run: everyone's speed as a bar, quartiles as whiskers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.installation import install_command
from edgespec.platform.files import atomic_file
from peers.base import Library
from peers.report import Row

LIBRARY = Library("matplotlib", "matplotlib", f"{install_command('bench')}, or give --no-plot")
OWN, SPECULATIVE, PLAIN = "#1b6ca8", "#e08e45", "#b8bfc6"
LEGEND = ((OWN, "edgespec, auto"), (SPECULATIVE, "speculative"), (PLAIN, "plain"))
BAR_INCHES = 0.34


def save_plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG. Raises CapabilityError when matplotlib is missing."""
    LIBRARY.load()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 1.4 + BAR_INCHES * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    medians = [row.tokens_per_second[1] for row in rows]
    below = [row.tokens_per_second[1] - row.tokens_per_second[0] for row in rows]
    above = [row.tokens_per_second[2] - row.tokens_per_second[1] for row in rows]
    axes.barh(places, medians, xerr=[below, above], color=[_colour(row) for row in rows], ecolor="#444", capsize=2)
    axes.set_yticks(places, [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for place, row in zip(places, rows, strict=True):
        axes.annotate(
            _label(row), (row.tokens_per_second[2], place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xlim(0, max(row.tokens_per_second[2] for row in rows) * 1.3)
    axes.set_xlabel("tokens per second of decoding (median over prompts, quartiles)")
    axes.set_title(title, fontsize=10)
    axes.legend(handles=[Patch(color=colour, label=text) for colour, text in LEGEND], loc="lower right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _colour(row: Row) -> str:
    if row.is_plain:
        return PLAIN
    return OWN if row.name.startswith("edgespec") else SPECULATIVE


def _label(row: Row) -> str:
    speed = f"{row.tokens_per_second[1]:.1f}"
    return speed if row.is_plain or row.speedup is None else f"{speed}  ({row.speedup[1]:.2f}x its plain)"

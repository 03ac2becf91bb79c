"""The training curves that ship beside the weights, drawn from the logs."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from edgespec.platform.files import atomic_file

DOMAINS = ("dialogue", "code", "arithmetic")


def read_log(path: Path) -> dict[str, list[float]]:
    """Columns of a training log, empty cells left out of their column's tail."""
    with path.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    return {name: [float(row[name]) for row in rows] for name in (rows[0] if rows else ())}


def _decorate(axes: Axes, title: str, label: str, legend: str) -> None:
    axes.set(title=title, xlabel="million tokens", ylabel=label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc=legend, ncols=2)


def draw_curves(target_log: Path, distill_log: Path, output: Path) -> None:
    """Losses of the target on the left, agreement of the students with it on the right."""
    target, students = read_log(target_log), read_log(distill_log)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    millions = [tokens / 1e6 for tokens in target["tokens"]]
    left.plot(millions, target["loss"], color="grey", label="training, running mean")
    for domain in DOMAINS:
        left.plot(millions, target[f"held_out_{domain}"], label=f"held-out {domain}")
    _decorate(left, "Target (8.1M)", "cross-entropy, nats per token", "upper right")
    millions = [tokens / 1e6 for tokens in students["tokens"]]
    for name, style in (("draft", "-"), ("medium", "--")):
        for index, domain in enumerate(DOMAINS):
            values = students[f"agreement_{domain}_{name}"]
            right.plot(millions, values, style, color=f"C{index}", label=f"{name}, {domain}")
    right.set_ylim(bottom=0.0)
    _decorate(right, "Students, on held-out text", "share of greedy choices equal to the target's", "lower right")
    with atomic_file(output) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)

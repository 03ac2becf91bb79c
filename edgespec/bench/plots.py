"""The figures of a benchmark, drawn from its report by matplotlib (extra `bench`); no display is needed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec.bench.report import Report
from edgespec.bench.style import VERDICT_COLOURS, colour
from edgespec.platform.files import write_atomically, write_errors

_DPI = 110
_LEAST_DRAFTED, _LEAST_TESTED, _LEAST_PASSES = 8, 5, 4  # with fewer the values are noise


def draw(report: Report, target: Path) -> list[Path]:
    """Write the figures to `target`: into one PNG file if it ends with .png, else into that folder as NAME.png each.

    Plots that are there are replaced. Raises StateError when `target` cannot be written.
    """
    if target.suffix.lower() == ".png":
        write_atomically(target, _sheet(report))
        return [target]
    return _draw_each(report, target)


def _sheet(report: Report) -> bytes:
    """All figures in one PNG, one below the other."""
    from matplotlib.figure import Figure

    names = list(images(report))
    figure = Figure(figsize=(7.2, 4.0 * max(len(names), 1)), dpi=_DPI, layout="constrained")
    for axes, name in zip(figure.subplots(max(len(names), 1), squeeze=False)[:, 0], names, strict=False):
        PLOTS[name](axes, report)
        axes.spines[["top", "right"]].set_visible(False)
    return _saved(figure)


def _draw_each(report: Report, folder: Path) -> list[Path]:
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in PLOTS:
            (folder / f"{name}.png").unlink(missing_ok=True)
    drawn = {folder / f"{name}.png": png for name, png in images(report).items()}
    for path, png in drawn.items():
        write_atomically(path, png)
    return list(drawn)


def images(report: Report) -> dict[str, bytes]:
    """PNG data by name; figures without data are omitted."""
    return {name: png for name, plot in PLOTS.items() if (png := _png(plot, report)) is not None}


def _png(plot: Callable[[Any, Report], bool], report: Report) -> bytes | None:
    from matplotlib.figure import Figure  # optional, and takes half a second

    figure = Figure(figsize=(7.2, 4.0), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    if not plot(axes, report):
        return None
    axes.spines[["top", "right"]].set_visible(False)
    return _saved(figure)


def _saved(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _speedup(axes: Any, report: Report) -> bool:
    rows = [(name, figures) for name, figures in report["domains"].items() if figures["speedup"]]
    if not rows:
        return False
    for y, (_, figures) in enumerate(reversed(rows)):
        spread = figures["speedup"]
        axes.barh(y, spread["median"], color=VERDICT_COLOURS[figures["verdict"]], height=0.65)
        axes.plot([spread["q1"], spread["q3"]], [y, y], color="black", linewidth=1.4, marker="|", markersize=7)
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
    labels = [f"{name}  {figures['speedup']['median']:.2f}x" for name, figures in reversed(rows)]
    axes.set_yticks(range(len(rows)), labels)
    axes.set(title="Speedup over plain decoding, median and quartiles of runs", xlabel="times the tokens per second")
    axes.set_xlim(left=0)
    return True


def _acceptance(axes: Any, report: Report) -> bool:
    steps = [step for step in report["acceptance_by_position"] if step["drafted_tokens"] >= _LEAST_DRAFTED]
    if not steps:
        return False
    positions = [step["position"] for step in steps]
    rates = [step["accepted_tokens"] / step["drafted_tokens"] for step in steps]
    axes.plot(positions, rates, marker="o", color=colour("model"))
    axes.set(ylim=(0, 1.05), xlabel="tokens of the answer before the round", title="Acceptance along the text")
    axes.set_ylabel("accepted / drafted tokens", color=colour("model"))
    lengths = axes.twinx()
    per_pass = [1 + step["accepted_tokens"] / step["num_rounds"] for step in steps]
    lengths.plot(positions, per_pass, marker="s", color=colour("ngram"), linestyle=":")
    lengths.set_ylabel("tokens per target pass", color=colour("ngram"))
    lengths.set_ylim(0, 1.1 * max(per_pass))
    lengths.spines["top"].set_visible(False)
    return True


def _lengths(axes: Any, report: Report) -> bool:
    counts = {name: {int(n): c for n, c in found.items()} for name, found in report["accepted_lengths"].items()}
    if set(counts) <= {"none"}:
        return False
    longest = max(max(found) for found in counts.values())
    xs = range(longest + 1)
    below = [0] * (longest + 1)
    for name, found in counts.items():
        heights = [found.get(x, 0) for x in xs]
        label = "no draft" if name == "none" else name
        axes.bar(xs, heights, bottom=below, color=colour(name), label=f"{label} ({sum(heights)} rounds)", width=0.8)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set(title="Accepted tokens per round", xlabel="accepted draft tokens", ylabel="rounds")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    return True


def _reliability(axes: Any, report: Report) -> bool:
    """Confidence against acceptance; point area: share of the drafter's tokens."""
    every = report["reliability"].items()
    found = {name: one for name, one in every if name != "all" and one["num_tokens"] >= _LEAST_DRAFTED}
    if not found:
        return False
    axes.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--", label="perfect")
    for name, one in found.items():
        bins = [point for point in one["bins"] if point["num_tokens"] >= _LEAST_TESTED]
        x, y = ([point[key] for point in bins] for key in ("confidence", "acceptance"))
        sizes = [20 + 500 * point["num_tokens"] / one["num_tokens"] for point in bins]
        error = one["expected_calibration_error"]
        axes.scatter(x, y, s=sizes, color=colour(name), alpha=0.6, linewidths=0, clip_on=False)
        axes.plot([], [], "o", color=colour(name), label=f"{name}: error {error:.3f}, {one['num_tokens']} tokens")
    axes.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05), title="Confidence against acceptance")
    axes.set(xlabel="confidence before verification", ylabel="share that was accepted")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return True


def _cost(axes: Any, report: Report) -> bool:
    curve = {int(width): seconds for width, seconds in report["cost_curve"].items()}
    if len(curve) < 2:
        return False
    plain_s = report["standard_pass_s"] or curve[min(curve)]
    passes = report["observed_passes"].items()
    seen = {int(width): one for width, one in passes if one["num_passes"] >= _LEAST_PASSES}
    widths = list(curve)
    times_ms = [1000 * seconds for seconds in curve.values()]
    axes.plot(widths, times_ms, marker="o", color=colour("model"), label="cost model: measured, refined while running")
    axes.scatter(
        list(seen),
        [1000 * one["median_s"] for one in seen.values()],
        s=[15 + 5 * min(one["num_passes"], 40) for one in seen.values()],
        color=colour("suffix"),
        alpha=0.7,
        linewidths=0,
        label="median of this run's passes",
    )
    axes.axhline(1000 * plain_s, color="black", linewidth=1, linestyle="--", label="a token of plain decoding")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.set(title="Cost of a target pass", xlabel="width: tokens in one pass")
    axes.set_ylabel("milliseconds", color=colour("model"))
    axes.set_ylim(bottom=0)
    room = axes.twinx()
    room.plot(
        widths, [width * plain_s / curve[width] for width in widths], linestyle=":", marker="s", color=colour("ngram")
    )
    room.set_ylabel("highest possible speedup (free drafts, all accepted)", color=colour("ngram"), fontsize=8)
    room.set_ylim(bottom=0)
    room.spines["top"].set_visible(False)
    return True


PLOTS: dict[str, Callable[[Any, Report], bool]] = {
    "speedup": _speedup,
    "acceptance": _acceptance,
    "accepted_lengths": _lengths,
    "reliability": _reliability,
    "cost_curve": _cost,
}

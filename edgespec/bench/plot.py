"""The picture of a benchmark, one PNG drawn from its report by matplotlib (extra `bench`); no display is needed."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

from edgespec.bench.report import Report
from edgespec.errors import CapabilityError, ConfigError
from edgespec.installation import install_command
from edgespec.platform.files import write_atomically

# The palette of Okabe and Ito, safe for colour-blind readers. `none`: rounds without a draft.
_COLOURS = {"model": "#0072B2", "ngram": "#E69F00", "suffix": "#009E73", "none": "#999999"}
_OTHERS = ("#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_VERDICTS = {"gains": "#009E73", "even": "#999999", "loses": "#D55E00", "unknown": "#BBBBBB"}
_DPI = 110


def check_picture(option: str, path: Path) -> None:
    """Before the work: raises ConfigError where no file can be written at `path`."""
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder: give a file name")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: its folder does not exist")


def check_plot(path: Path) -> None:
    """Raises CapabilityError without matplotlib, ConfigError for a place or name that will not do."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CapabilityError(f"--plot needs matplotlib, which is not installed: {install_command('bench')}")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: the picture is a PNG file, so the name must end in .png")
    check_picture("--plot", path)


def draw(report: Report, path: Path) -> None:
    """Speedup by domain, accepted tokens per round, and the cost of a pass, one below the other.

    Raises StateError when `path` cannot be written.
    """
    from matplotlib.figure import Figure  # optional, and takes half a second

    figure = Figure(figsize=(7.2, 12.0), dpi=_DPI, layout="constrained")
    for axes, plot in zip(figure.subplots(3), (_speedup, _lengths, _cost), strict=True):
        plot(axes, report)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def _colour(drafter: str) -> str:
    return _COLOURS.get(drafter) or _OTHERS[sum(drafter.encode()) % len(_OTHERS)]


def _speedup(axes: Any, report: Report) -> None:
    rows = [(name, figures) for name, figures in report["domains"].items() if figures["speedup"]]
    for y, (_, figures) in enumerate(reversed(rows)):
        spread = figures["speedup"]
        axes.barh(y, spread["median"], color=_VERDICTS[figures["verdict"]], height=0.65)
        axes.plot([spread["q1"], spread["q3"]], [y, y], color="black", linewidth=1.4, marker="|", markersize=7)
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
    labels = [f"{name}  {figures['speedup']['median']:.2f}x" for name, figures in reversed(rows)]
    axes.set_yticks(range(len(rows)), labels)
    axes.set(title="Speedup over plain decoding, median and quartiles of runs", xlabel="times the tokens per second")
    axes.set_xlim(left=0)


def _lengths(axes: Any, report: Report) -> None:
    counts = {name: {int(n): c for n, c in every.items()} for name, every in report["accepted_lengths"].items()}
    longest = max((max(every) for every in counts.values()), default=0)
    xs = range(longest + 1)
    below = [0] * (longest + 1)
    for name, every in counts.items():
        heights = [every.get(x, 0) for x in xs]
        label = f"{'no draft' if name == 'none' else name} ({sum(heights)} rounds)"
        axes.bar(xs, heights, bottom=below, color=_colour(name), label=label, width=0.8)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set(title="Accepted tokens per round", xlabel="accepted draft tokens", ylabel="rounds")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if counts:
        axes.legend(frameon=False)


def _cost(axes: Any, report: Report) -> None:
    curve = {int(width): 1000 * seconds for width, seconds in report["cost_curve"].items()}
    axes.plot(list(curve), list(curve.values()), marker="o", color=_colour("model"))
    axes.set(title="Cost of a target pass", xlabel="tokens in one pass", ylabel="milliseconds")
    axes.set_ylim(bottom=0)

"""Charts of cost curves: bars of block characters for a terminal, and a PNG drawn by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.errors import CapabilityError, ConfigError
from edgespec.installation import install_command
from edgespec.platform.files import atomic_file
from edgespec.tuning.calibration import Calibration, DraftCalibration

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_DOTS_PER_INCH = 110


def bar(value: float, most: float, cells: int) -> str:
    """A bar of up to `cells` characters for `value` / `most`, with a resolution of an eighth of a character."""
    eighths = round(8 * cells * min(max(value / most, 0.0), 1.0)) if most > 0 else 0
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def check_plot(path: Path) -> None:
    """Raise ConfigError if `path` is not a .png in an existing folder, CapabilityError without matplotlib."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: the chart is a PNG file, so the name must end in .png")
    if path.is_dir():
        raise ConfigError(f"--plot {path} is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.parent} does not exist; create it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise CapabilityError(f"--plot needs matplotlib: {install_command('bench')}") from exc


def draw(calibration: Calibration, draft: DraftCalibration | None, title: str, path: Path) -> None:
    """Draw the measured and fitted curve (left) and the speedup limit by width (right). Writes `path` atomically."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, context in enumerate(calibration.contexts):
        _draw_context(left, calibration, context, f"C{index}")
        _draw_share(right, calibration, context, f"C{index}")
    if draft is not None:
        left.axhline(1e3 * draft.cost.token_s, color="grey", linestyle=":", label="one token of the draft")
    for axes in (left, right):
        axes.set_xlabel("width of the pass, tokens")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    left.set(title=title, ylabel="milliseconds per pass", xlabel="width of the pass, tokens (filled: useful)")
    right.set(title="Highest speedup that a width allows", ylabel="width x t(1) / t(width), fitted")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=_DOTS_PER_INCH, format="png")


def _draw_context(axes: Any, calibration: Calibration, context: int, colour: str) -> None:
    """Medians with quartiles, the fit as a line; useful widths are filled."""
    samples = [sample for sample in calibration.samples if sample.context_tokens == context]
    widths = [sample.width for sample in samples]
    times = [1e3 * sample.median_s for sample in samples]
    errors = [500 * sample.median_s * sample.spread for sample in samples]
    faces = [colour if width in calibration.useful_widths else "white" for width in widths]
    every = range(1, max(widths) + 1)
    fitted = [1e3 * calibration.curve.at(width, context) for width in every]
    axes.errorbar(widths, times, errors, fmt="none", ecolor=colour, alpha=0.5)
    axes.scatter(widths, times, s=22, c=faces, edgecolors=colour, zorder=3)
    label = f"{context} tokens cached"
    axes.plot(every, fitted, color=colour, linewidth=1, label=label)


def _draw_share(axes: Any, calibration: Calibration, context: int, colour: str) -> None:
    pass_s, widths = calibration.curve.table(context), calibration.widths
    gains = [width * pass_s[1] / pass_s[width] for width in widths]
    axes.plot(widths, gains, marker="o", markersize=3, color=colour, label=f"{context} tokens cached")

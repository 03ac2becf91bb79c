"""What `calibrate` found, as a table with conclusions or as one JSON object."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from edgespec.cli import say
from edgespec.platform.disk_cache import cache_folder
from edgespec.tuning.calibration import Calibration, DraftCalibration
from edgespec.tuning.chart import bar as drawn_bar

if TYPE_CHECKING:
    from edgespec.export.conversion_gain import Gain

_BAR_CELLS = 20
_BUSY_SPREAD = 0.25


@dataclass(frozen=True, slots=True)
class Found:
    """Results of one calibration. `padding`: seconds of a single-token step, unpadded and padded, and their ratio.

    `gains`: what a GGUF would gain as ONNX; `is_stored`: whether later runs find it.
    """

    facts: dict[str, Any]
    target: Calibration
    draft: DraftCalibration | None
    padding: dict[str, float] | None
    gains: list[Gain]
    is_stored: bool


def show(found: Found) -> None:
    """Print the table and what follows from it."""
    console = Console(highlight=False, markup=False)
    console.print(_table(found.target))
    for line in _conclusions(found):
        say(line)


def _table(target: Calibration) -> Table:
    """A row per width: times by context, ratio to a single token, and a bar; useful widths are marked."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    context = target.middle_context
    table.add_column("width", justify="right")
    for each in target.contexts:
        table.add_column(f"ms at {each}", justify="right")
    table.add_column("spread", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column(f"at {context} cached")
    most_s = max(target.sample(width, context).median_s for width in target.widths)
    lone_s = target.sample(target.widths[0], context).median_s
    for width in target.widths:
        here = target.sample(width, context)
        is_useful = width in target.useful_widths
        table.add_row(
            f"{width}{'*' if is_useful else ' '}",
            *(f"{1e3 * target.sample(width, each).median_s:.2f}" for each in target.contexts),
            f"{here.spread:.0%}",
            f"{here.median_s / lone_s:.2f}",
            drawn_bar(here.median_s, most_s, _BAR_CELLS),
            style="bold" if is_useful else "dim",
        )
    return table


def _conclusions(found: Found) -> list[str]:
    target, facts = found.target, found.facts
    context = target.curve.context
    lines = [
        f"* useful widths: {', '.join(map(str, target.useful_widths))} (a wider pass costs more)",
        f"each cached token adds {_micro(context.fixed_s)} to a pass and {_micro(context.row_s)} per row; the fitted "
        f"curve is off by {target.fit_error:.1%} (median)",
    ]
    length, speedup = target.ceiling(0.0)
    lines.append(f"ceiling of any drafter: {speedup:.2f}x, if drafting were free and all {length} tokens were accepted")
    if found.draft is not None:
        cost = found.draft.cost
        length, speedup = target.ceiling(cost.token_s)
        lines.append(
            f"the draft model: {1e3 * cost.token_s:.2f} ms per token ({_micro(found.draft.context_s)} more per cached "
            f"one), {1e3 * cost.read_s:.3f} ms per token read; its ceiling: {speedup:.2f}x at {length} tokens"
        )
    if found.padding is not None:
        low, high = facts["pinned_class"]
        lines.append(
            f"reproducible mode uses widths {low} to {high}: single-token steps are {found.padding['ratio']:.2f}x "
            f"slower, {1e3 * found.padding['padded_s']:.2f} instead of {1e3 * found.padding['lone_s']:.2f} ms"
        )
    elif facts["pinned_class"] is not None:
        lines.append("reproducible mode costs single-token steps nothing on this model")
    lines += [_gain_line(gain) for gain in found.gains]
    if found.is_stored:
        lines.append("stored for later runs with these files, this engine and these threads")
    else:
        lines.append(f"not stored: {cache_folder()} cannot be written; EDGESPEC_HOME names another place")
    if target.spread > _BUSY_SPREAD:
        lines.append(
            f"the machine was busy: times of equal passes spread by {target.spread:.0%}; close other programs and "
            "measure again for better figures"
        )
    return lines


def _gain_line(gain: Gain) -> str:
    drafted, half = gain.drafted(), 1e3 * gain.drafted_s()
    return (
        f"as ONNX {gain.quant} (edgespec export --to onnx --quant {gain.quant}), estimated from some of its layers: "
        f"{1e3 * gain.there[1]:.1f} ms a token, {half:.1f} where half of the drafted tokens are accepted; "
        f"{gain.plain:.2f}x and {drafted:.2f}x of this file's speed"
    )


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} µs"


def as_object(found: Found) -> dict[str, Any]:
    """All of it for --json."""
    target, draft = found.target, found.draft
    free_length, free_speedup = target.ceiling(0.0)
    shown: dict[str, Any] = {
        **found.facts,
        "samples": [dataclasses.asdict(sample) for sample in target.samples],
        "base_s": {str(width): seconds for width, seconds in target.curve.measured.items()},
        "fixed_s": target.curve.context.fixed_s,
        "row_s": target.curve.context.row_s,
        "fit_error": target.fit_error,
        "spread": target.spread,
        "useful_widths": list(target.useful_widths),
        "ceiling": {"draft_length": free_length, "speedup": free_speedup},
        "padding": found.padding,
        "draft": None,
        "as_onnx": {
            gain.quant: {"token_s": gain.there[1], "plain": gain.plain, "half_accepted": gain.drafted()}
            for gain in found.gains
        },
    }
    if draft is not None:
        length, speedup = target.ceiling(draft.cost.token_s)
        shown["draft"] = {
            "samples": [dataclasses.asdict(sample) for sample in draft.samples],
            "token_s": draft.cost.token_s,
            "read_s": draft.cost.read_s,
            "fixed_s": draft.fixed_s,
            "context_s": draft.context_s,
            "ceiling": {"draft_length": length, "speedup": speedup},
        }
    return shown

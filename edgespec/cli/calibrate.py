"""`edgespec calibrate`: measures the time of model passes on this machine, stores it for later runs and draws it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from edgespec.cli import say
from edgespec.cli.bar import bar
from edgespec.cli.help import SettingsCommand
from edgespec.cli.main import INTERRUPTED
from edgespec.cli.options import resolve_settings, settings_options
from edgespec.cli.session import Session, open_session, show_configuration
from edgespec.cli.terminal import note
from edgespec.config import keywords_of
from edgespec.config.settings import REMEMBERING
from edgespec.config.sources import Settings
from edgespec.control.measure import cost_key, store_curve, store_draft_cost, store_file_curve
from edgespec.engines.base import Engine
from edgespec.engines.disk_cache import cache_folder
from edgespec.engines.machine import machine_name
from edgespec.errors import CapabilityError, ConfigError
from edgespec.installation import has_engine
from edgespec.runtime import Model, load
from edgespec.tuning import calibration as measuring
from edgespec.tuning.calibration import Calibration, DraftCalibration
from edgespec.tuning.chart import bar as drawn_bar
from edgespec.tuning.chart import check_plot, draw

if TYPE_CHECKING:
    from edgespec.export.conversion_gain import Gain

DEFAULT_TURNS = 12
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


@click.command(cls=SettingsCommand)
@settings_options("load", leave_out=REMEMBERING)
@click.option("--contexts", metavar="N,N", help="Cached tokens to measure at  [default: 64,512,2048]")
@click.option("--passes", type=int, default=DEFAULT_TURNS, show_default=True, help="Passes per width and context")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the curve as a PNG too")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the drawing")
def command(
    model_name: str | None,
    config_file: Path | None,
    contexts: str | None,
    passes: int,
    plot: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Measure how the time of a target pass grows with its width and context, and the time of a draft token.

    Automatic speculation learns both while it runs; this measures them carefully and stores them for later runs with
    the same files, engine, threads, mode and machine. MODEL is a name, a GGUF or ONNX file, or a folder with one.
    """
    wanted = None if contexts is None else _numbers(contexts)
    if passes < 2:
        raise ConfigError(f"--passes must be at least 2, got {passes}")
    if plot is not None:
        check_plot(plot)
    settings = resolve_settings(given, model_name, config_file, speculates=True)
    try:
        found = _calibrate(settings, wanted, passes)
    except KeyboardInterrupt:
        note("interrupted: earlier measurements are unchanged")
        return INTERRUPTED
    if as_json:
        click.echo(json.dumps(_as_object(found), allow_nan=False))
    else:
        _show(found)
    if plot is not None:  # last: what was measured is told even where the picture cannot be written
        draw(found.target, found.draft, f"{found.facts['model']}, {found.facts['engine']}", plot)
        note(f"drawn: {plot}")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--contexts {text!r} is not a list of whole numbers such as 64,512") from None


def _calibrate(settings: Settings, wanted: tuple[int, ...] | None, turns: int) -> Found:
    session = open_session(settings)
    with session.model as model:
        target_key = cost_key(model.target, model.pair.paths("target"))
        draft_key = "" if model.draft_engine is None else cost_key(model.draft_engine, model.pair.paths("draft"))
        with model.measuring() as engines:
            target, draft = _measure(session, engines, wanted, turns)
            gains = _gains(model, engines)
        target_files = model.pair.paths("target")
        pinned = model.target.facts.pinned_class
        facts = _facts(model)
    padding = None
    if pinned is not None and pinned[0] > 1:
        padding = _padding(model, pinned[0], target.contexts[0], turns)
    # Only now: a model stores its own estimate when it is closed.
    is_stored = store_curve(target_key, target.curve)
    store_file_curve(target_files, target.curve)
    if draft is not None:
        store_draft_cost(draft_key, draft.cost)
    return Found(facts, target, draft, padding, gains, is_stored)


def _measure(
    session: Session, engines: tuple[Engine, Engine | None], wanted: tuple[int, ...] | None, turns: int
) -> tuple[Calibration, DraftCalibration | None]:
    target, draft = engines
    widths = measuring.allowed_widths(target)
    contexts = measuring.allowed_contexts(target, wanted, max(widths))
    show_configuration(session)
    with bar("the target's passes", measuring.num_passes(widths, contexts, turns)) as progress:
        fitted = measuring.fit_target(measuring.measure(target, widths, contexts, turns, progress.advance))
        if draft is None:
            return fitted, None
        half = max(draft.facts.context_length // 2, 1)
        widths = tuple(sorted({min(width, half) for width in measuring.draft_widths(draft)}))
        room = draft.facts.context_length - max(widths)
        contexts = tuple(sorted({min(context, room) for context in contexts}))
        progress.on_progress("the draft's passes")
        progress.grow(measuring.num_passes(widths, contexts, turns))
        samples = measuring.measure(draft, widths, contexts, turns, progress.advance)
    return fitted, measuring.fit_draft(samples, widths[-1])


def _padding(model: Model, low: int, context: int, turns: int) -> dict[str, float]:
    """Time single-token steps, unpadded and padded in turns, on a copy of the target without reproducible mode."""
    chosen = keywords_of(model.options) | {"reproducible": False, "drafter": "none"}
    steps = measuring.num_passes((1, low), (context,), turns)
    with load(**chosen) as plain, bar("the cost of padding", steps) as progress:
        samples = measuring.measure(plain.target, (1, low), (context,), turns, progress.advance)
    return dict(measuring.padding_cost(samples, low))


def _gains(model: Model, engines: tuple[Engine, Engine | None]) -> list[Gain]:
    facts = engines[0].facts
    if facts.name != "llamacpp" or facts.placement or not has_engine("onnx"):
        return []
    from edgespec.export.conversion_gain import measure_gains

    try:
        with bar("some layers as ONNX"):
            return measure_gains(*engines, model.pair.target, facts.threads)
    except CapabilityError as exc:  # the costs of the file itself are known
        note(str(exc))
        return []


def _facts(model: Model) -> dict[str, Any]:
    facts = model.target.facts
    return {
        "model": model.pair.name,
        "engine": facts.name,
        "device": facts.device,
        "threads": facts.threads,
        "machine": machine_name(),
        "context_length": facts.context_length,
        "pinned_class": facts.pinned_class,
        "reproducible": model.reproducible,
    }


# -- what is shown


def _show(found: Found) -> None:
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


def _as_object(found: Found) -> dict[str, Any]:
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

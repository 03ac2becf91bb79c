"""`edgespec calibrate`: measures the time of model passes on this machine, stores it for later runs and draws it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import FilePath
from edgespec.cli.bar import bar
from edgespec.cli.calibrate_report import Found, as_object, show
from edgespec.cli.help import SettingsCommand
from edgespec.cli.main import INTERRUPTED
from edgespec.cli.options import resolve_settings, settings_options
from edgespec.cli.session import Session, open_session, show_configuration
from edgespec.cli.terminal import note
from edgespec.config import keywords_of
from edgespec.config.options import REMEMBERING
from edgespec.config.sources import Settings
from edgespec.control.measure import cost_key, store_curve, store_draft_cost, store_file_curve
from edgespec.engines.base import Engine
from edgespec.errors import CapabilityError, ConfigError
from edgespec.installation import has_engine
from edgespec.platform.machine import machine_name
from edgespec.runtime import Model, load
from edgespec.tuning import calibration as measuring
from edgespec.tuning.calibration import Calibration, DraftCalibration
from edgespec.tuning.chart import check_plot, draw

if TYPE_CHECKING:
    from edgespec.export.conversion_gain import Gain

DEFAULT_TURNS = 12


@click.command(cls=SettingsCommand)
@settings_options("load", leave_out=REMEMBERING)
@click.option("--contexts", metavar="N,N", help="Cached tokens to measure at  [default: 64,512,2048]")
@click.option("--passes", type=int, default=DEFAULT_TURNS, show_default=True, help="Passes per width and context")
@click.option("--plot", type=FilePath(), metavar="FILE", help="Draw the curve as a PNG too")
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
        click.echo(json.dumps(as_object(found), allow_nan=False))
    else:
        show(found)
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

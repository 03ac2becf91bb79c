"""`edgespec plan`: the memory that a pair would take, by part, and whether it fits; nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from edgespec.cli.options import SettingsCommand, resolve_settings, settings_options
from edgespec.config.options import REMEMBERING, LoadOptions
from edgespec.config.values import aligned, as_size
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import Fitted, chosen_context, fit, placed
from edgespec.memory.plan import Room, planned
from edgespec.memory.watch import plan_object

REFUSED = 2


@click.command(cls=SettingsCommand)
@settings_options("load", leave_out=REMEMBERING)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table")
def command(model_name: str | None, config_file: Path | None, as_json: bool, **given: Any) -> int:
    """Show the memory that a model and its draft would take, by part, and whether it fits. Loads nothing.

    With --memory it chooses what to give up to fit into a budget, as every load does. Exit code 2: it would be refused.
    MODEL is a name, a GGUF or ONNX file, or a folder with one.
    """
    settings = resolve_settings(given, model_name, config_file)
    options = LoadOptions(**settings.part("load"))
    room = Room.now(options.memory)
    with keeping_headers():
        pair = resolve_pair(options)
        options = placed(chosen_context(options, pair, room), pair)
        plan = planned(options, pair)
        refusal = ""
        try:
            fitted = fit(options, pair, room)
        except CapabilityError as exc:
            fitted, refusal = Fitted(options, pair, plan, room.verdict(plan)), str(exc)
    if as_json:
        click.echo(json.dumps({**plan_object(fitted), "refusal": refusal or None}))
    else:
        _show(fitted, refusal)
    return REFUSED if refusal else 0


def _show(fitted: Fitted, refusal: str) -> None:
    """A table without rich, whose import takes longer than the plan, and the verdict."""
    plan, options = fitted.plan, fitted.options
    sizes = [(part.name, *(as_size(size) if size else "" for size in (part.own, part.mapped))) for part in plan.parts]
    together = ("together, at most", as_size(plan.own_bytes), as_size(plan.mapped_bytes))
    rows = [(plan.name, "own memory", "mapped from files"), *sizes, together]
    for number, line in enumerate(aligned(rows, right=(1, 2))):
        click.echo(click.style(line, bold=number in (0, len(rows) - 1)))
    if plan.device_note:
        layers = options.target_gpu_layers, options.draft_model_gpu_layers
        experts = f" -ncmoe {options.cpu_moe_layers}" if options.cpu_moe_layers else ""
        click.echo(plan.device_note + (f" (-ngl {layers[0]} -ngld {layers[1]}{experts})" if any(layers) else ""))
    for each in fitted.given_up:
        click.echo(f"given up: {each.text} ({each.flags})")
    click.echo(f"refused: {refusal}" if refusal else f"{fitted.verdict}")

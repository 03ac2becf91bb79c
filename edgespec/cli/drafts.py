"""`edgespec drafts`: which draft model or head to run with a target."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from edgespec.cli.shell import models, run_command
from edgespec.cli.status import waiting
from edgespec.cli.terminal import note
from edgespec.installation import quoted
from edgespec.loading.drafts import Aim, Candidate, find_aim, rank


@click.command("drafts", short_help="Rank the draft models and heads for a target.")
@click.argument("target", metavar="TARGET", shell_complete=models)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object")
def command(target: str, as_json: bool) -> int:
    """Rank draft models and heads for TARGET: those on this machine and those to pull.

    Compares vocabularies, heads and targets as loading does, sizes and memory; bench measures what a draft gains. The
    last line is the command to run. TARGET is a name, a file or a folder.
    """
    with waiting("comparing vocabularies"):
        aim = find_aim(target)
        found = rank(aim)
    best = next((each for each in found if each.is_same and not each.why_not), None)
    commands = _commands(aim, target, best)
    if as_json:
        drafts = [dataclasses.asdict(each) | {"path": each.path and str(each.path)} for each in found]
        click.echo(json.dumps({"target": aim.name, "bytes": aim.bytes, "drafts": drafts, "commands": commands}))
        return 0
    click.echo(f"Drafts for {aim.name} ({aim.bytes / 1e6:.0f} MB), best first:")
    for number, each in enumerate(found, 1):
        click.echo(f"  {number}. {_sentence(each, aim)}")
    if best is None:
        note("none can be used: lookups, which need no model, draft instead")
    for line in commands:
        click.echo(line)
    return 0


def _commands(aim: Aim, target: str, best: Candidate | None) -> list[str]:
    run = run_command(target, aim.file)
    if aim.file is None and aim.entry is not None:
        is_own = best is None or best.name == aim.entry.drafted_by  # of several heads of its own the first one
        return [f"edgespec pull {target}" + ("" if is_own or best is None else f" --draft {best.name}"), run]
    if best is None or (best.path is not None and best.path == aim.own_draft):
        return [run]
    get = [] if best.path else [f"edgespec pull {best.name}"]
    return [*get, f"{run} -md {quoted(best.name)}"]


def _sentence(each: Candidate, aim: Aim) -> str:
    """Its name, size and place, and how it compares."""
    path = each.path
    is_below = path is not None and str(path) == each.name and path.is_relative_to(Path.cwd())
    name = str(path.relative_to(Path.cwd())) if path is not None and is_below else each.name
    size = f"{each.bytes / 1e6:.0f} MB, {each.bytes / aim.bytes:.0%} of the target" if each.bytes else "size not known"
    said = [f"{name}: {size}", "here" if path else "to pull"]
    if each.why_not:
        return f"{', '.join(said)}; cannot draft: {', '.join(filter(None, (each.vocabulary, each.why_not)))}"
    said += ["with llama.cpp"] if each.leaves_kernels else []
    return f"{', '.join(said)}; {each.vocabulary if each.is_head else f'vocabulary: {each.vocabulary}'}"

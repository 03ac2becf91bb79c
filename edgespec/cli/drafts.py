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
from edgespec.loading.draft_ranking import ASSUMED_ACCEPTANCE, Aim, Candidate, find_aim, has_run, rank
from edgespec.loading.own_models import fits

_WORTH = 1.02


@click.command("drafts", short_help="Rank the draft models and heads for a target.")
@click.argument("target", metavar="TARGET", shell_complete=models)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object")
def command(target: str, as_json: bool) -> int:
    """Rank draft models and heads for TARGET: those on this machine and those to pull.

    Compares vocabularies, heads and targets as loading does, sizes, memory and a forecast of the speed; the note says
    what speaks for the first one. The last line is the command to run. TARGET is a name, a file or a folder.
    """
    with waiting("comparing vocabularies"):
        aim = find_aim(target)
        found = rank(aim)
    usable = (each for each in found if each.is_same and not each.why_not and each.fits is not False)
    best = next((each for each in usable if each.speedup >= _WORTH), None)
    commands = _commands(aim, target, best)
    if as_json:
        drafts = [dataclasses.asdict(each) | {"path": each.path and str(each.path)} for each in found]
        click.echo(json.dumps({"target": aim.name, "bytes": aim.bytes, "drafts": drafts, "commands": commands}))
        return 0
    if fits(aim.bytes) is False:
        note(f"{aim.name}, {aim.bytes / 1e9:.2f} GB, does not fit into the memory that is available now")
    if not found:
        note(f"no smaller model with {aim.name}'s vocabulary is known: drafters that need no model are used")
    else:
        _show(aim, found)
        costs = "times measured on this machine" if has_run(aim) else "sizes, until the target has run here"
        note(f"a forecast from {costs}, if {ASSUMED_ACCEPTANCE:.0%} of a draft are accepted")
        if best is not None:
            note(f"best: {_shortened(best.name)}: {best.why}")
        else:
            note("none is expected to gain: lookups, which need no model, draft instead")
    for line in commands:
        click.echo(line)
    return 0


def _commands(aim: Aim, target: str, best: Candidate | None) -> list[str]:
    get = [] if aim.file is not None else [f"edgespec pull {target}"]
    run = run_command(target, aim.file)
    if best is None or (best.is_here and best.path == aim.own_draft):
        return [*get, run]
    if not get and not best.is_here:
        get = [f"edgespec pull {best.name}"]
    if aim.file is None and aim.entry is not None:
        is_own = best.name == aim.entry.drafted_by  # of heads in its own repository the first one that is listed
        return [f"edgespec pull {target}" + ("" if is_own else f" --draft {best.name}"), run]
    return [*get, f"{run} -md {quoted(best.name)}"]


def _show(aim: Aim, found: list[Candidate]) -> None:
    """A sentence for each."""
    click.echo(f"Drafts for {aim.name} ({aim.bytes / 1e6:.0f} MB), best first:")
    for number, each in enumerate(found, 1):
        where = "here" if each.is_here else "to pull"
        size = f"{each.bytes / 1e6:.0f} MB, {each.share:.0%} of the target" if each.bytes else "size not known"
        said = [f"{_shortened(each.name)}: {size}", where]
        said += ["does not fit into the free memory beside it"] if each.fits is False else []
        if each.why_not:
            why = ", ".join(filter(None, (each.vocabulary, each.why_not)))
            click.echo(f"  -  {', '.join(said)}; cannot draft: {why}")
            continue
        said += [f"about {each.speedup:.2f} times the speed" if each.speedup >= _WORTH else "no faster"]
        what = each.vocabulary if each.is_head else f"vocabulary: {each.vocabulary}"
        click.echo(f"  {number}. {', '.join(said)}; {what}")


def _shortened(name: str) -> str:
    """The path of a file from here, where that is shorter and names it too."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else name

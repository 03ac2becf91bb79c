"""`edgespec pair`: which draft model to run with a target."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from edgespec.cli.completion import models
from edgespec.cli.run_command import run_command
from edgespec.cli.terminal import note
from edgespec.installation import quoted
from edgespec.loading.own_models import fits
from edgespec.tuning.matching import Aim, Candidate, find_aim, has_run, rank

_WORTH = 1.02
_WIDE = 1000  # characters


@click.command("pair", short_help="Rank the draft models for a target.")
@click.argument("target", metavar="TARGET", shell_complete=models)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object")
def command(target: str, as_json: bool) -> int:
    """Rank draft models for TARGET: those on this machine and those to pull.

    Compares vocabularies as loading does, sizes, memory and a forecast of the speed. The last line is the command to
    run. TARGET is a name, a file or a folder.
    """
    aim = find_aim(target)
    found = rank(aim)
    best = next((each for each in found if _is_useful(each)), None)
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
        _show(found)
        costs = "costs measured on this machine" if has_run(aim) else "costs guessed from sizes"
        note(f"the speedup is a forecast: {costs}; ~ assumes an acceptance of {found[0].acceptance:.0%}")
    for line in commands:
        click.echo(line)
    return 0


def _is_useful(draft: Candidate) -> bool:
    return draft.is_same and not draft.why_not and draft.speedup >= _WORTH and draft.fits is not False


def _commands(aim: Aim, target: str, best: Candidate | None) -> list[str]:
    get = [] if aim.file is not None else [f"edgespec pull {target}"]
    run = run_command(target, aim.file)
    if best is None or (best.is_here and best.path == aim.own_draft):
        return [*get, run]
    if not get and not best.is_here:
        get = [f"edgespec pull {best.name}"]
    if aim.file is None and aim.entry is not None:
        is_own = best.name == aim.entry.draft
        return [f"edgespec pull {target}" + ("" if is_own else f" --draft {best.name}"), run]
    return [*get, f"{run} -md {quoted(best.name)}"]


def _show(found: list[Candidate]) -> None:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("draft", "size", "of target", "fits", "forecast", "vocabulary"):
        right = heading in ("size", "of target", "forecast")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for each in found:
        forecast = "" if each.why_not else f"{'~' if each.is_assumed else ''}{each.speedup:.2f}x"
        where = _shortened(each.name) if each.is_here else f"{each.name} (to pull)"
        table.add_row(
            where,
            f"{each.bytes / 1e6:.0f} MB",
            f"{each.share:.0%}",
            {True: "yes", False: "no", None: "?"}[each.fits],
            forecast,
            f"{each.vocabulary}: {each.why_not}"
            if each.vocabulary and each.why_not
            else each.vocabulary or each.why_not,
        )
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a path in a file or a pipe stays in one piece
        console.width = _WIDE
    console.print(table)


def _shortened(name: str) -> str:
    """The path of a file from here, where that is shorter and names it too."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else name

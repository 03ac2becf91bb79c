"""`edgespec handover`: the command that runs a pair on a server for many users."""

from __future__ import annotations

import dataclasses
import json

import click

from edgespec.cli.completion import models
from edgespec.cli.terminal import note
from edgespec.installation import joined, quoted
from edgespec.tuning.handover import HELP, check, handover


class _Server(click.ParamType[str]):
    """One of the servers; all other commands begin with a model, so this is where a model gets to by mistake."""

    name = "server"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in HELP:
            example = f"edgespec handover llama-server {quoted(value)}"
            self.fail(f"{value!r} is not one of {', '.join(HELP)}; the server comes before the model, as in: {example}")
        return value


@click.command("handover", short_help="Write how vLLM, SGLang or llama-server runs a pair.")
@click.argument("engine", metavar="SERVER", type=_Server())
@click.argument("model", metavar="MODEL", shell_complete=models)
@click.option("-md", "--draft", metavar="MODEL", help="Draft model, if MODEL has none")
@click.option("--weights", metavar="ID", help="Hub id of the target's original weights, for vLLM and SGLang")
@click.option("--draft-weights", metavar="ID", help="Hub id of the draft's original weights")
@click.option("--heads", is_flag=True, help="Draft with the published EAGLE-3 head, if one is known")
@click.option("--draft-length", type=int, metavar="N", help="Tokens per draft [default: as tuned here, else 4]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object")
def command(
    engine: str,
    model: str,
    draft: str | None,
    weights: str | None,
    draft_weights: str | None,
    heads: bool,
    draft_length: int | None,
    as_json: bool,
) -> int:
    """Write the command that starts SERVER (vllm, sglang, llama-server) with MODEL and its draft.

    edgespec runs on one device, for one person or a few. For many users, run the same pair on a server made for them,
    with the draft length that `edgespec tune` found. MODEL is a name that `edgespec ls` shows, a file or a folder.
    """
    found = handover(
        engine, model, draft=draft, weights=weights, draft_weights=draft_weights, length=draft_length, heads=heads
    )
    is_checked = check(found)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found) | {"command": found.command, "checked": is_checked}))
        return 0
    click.echo(joined(found.command))
    if found.note:
        note(found.note)
    if draft_length is None and not found.is_measured:
        tune = joined(["edgespec", "tune", model, *(["-md", draft] if draft else [])])
        note(f"a draft length of {found.length} is a guess: {tune} measures the best one here")
    if not is_checked:
        note(f"{engine} is not installed here: these flags were not checked against it")
    return 0

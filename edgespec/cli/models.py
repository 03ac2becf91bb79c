"""`edgespec ls`, `show`, `add`, `rm`: the models on this machine, and those that can be pulled."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from edgespec.cli import FilePath, printable, say
from edgespec.cli.shell import names_here, names_known, run_command
from edgespec.cli.terminal import note
from edgespec.formats.gguf.check import check_gguf
from edgespec.installation import quoted
from edgespec.loading.catalogue import Entry, entries
from edgespec.loading.own_models import (
    Listed,
    drafted_from,
    entry_bytes,
    fits,
    list_elsewhere,
    list_here,
    list_known,
    pair_bytes,
    remove,
)
from edgespec.loading.own_models import add as add_model
from edgespec.loading.registry import is_known, models_folder, resolve

_FITS = {True: "yes", False: "no", None: "?"}
_LEAST_TEXT = 24  # columns; descriptions are left out where a terminal has fewer for them


@click.command("ls", short_help="List models: those here and those to pull.")
@click.option("--all", "everything", is_flag=True, help="Also models that do not fit into this machine's memory")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list")
def ls(everything: bool, as_json: bool) -> int:
    """List the models on this machine, also those of Ollama, LM Studio and the hub's cache, and those to pull.

    Sizes are those of the target with its draft model or heads; ~ marks a guess from the number of weights. Whether a
    model fits depends on the memory that is available now.
    """
    here = [*list_here(), *list_elsewhere()]
    known = list(list_known({each.name for each in here}))
    shown = known if everything else [each for each in known if each.fits is not False]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(each) for each in (*here, *(known if everything else shown))]))
        return 0
    _show_list([*here, *shown])
    note(f"models are kept in {models_folder()}")
    if len(shown) < len(known):
        note(f"{len(known) - len(shown)} more do not fit into the memory that is available: edgespec ls --all")
    return 0


def _show_list(models: Sequence[Listed]) -> None:
    """A line per model; only descriptions are cut where a terminal is narrow, and what is wrong is said below then."""
    console = Console(highlight=False, markup=False)
    rows = [("name", "size", "fits", "state", "draft", "")]
    rows += [(each.name, _size(each), _FITS[each.fits], each.state, each.draft, each.description) for each in models]
    *widths, _ = (max(map(len, cells)) for cells in zip(*rows, strict=True))
    left = max(console.width - sum(widths) - 2 * len(widths), 0) if console.is_terminal else sys.maxsize
    for index, (name, size, *rest, description) in enumerate(rows):
        cells = (name.ljust(widths[0]), size.rjust(widths[1]), *map(str.ljust, rest, widths[2:]))
        line = "  ".join((*cells, _cut(printable(description), left))).rstrip()
        console.print(line, style="" if index else "bold", soft_wrap=True)
    for each in models:
        if each.state in ("damaged", "unfinished") and len(each.description) > left:
            say(f"{each.name} is {each.state}: {each.description}")


def _cut(text: str, columns: int) -> str:
    """As many words of `text` as fit, with dots for the others; nothing where that would say nothing."""
    return textwrap.shorten(text, columns, placeholder="...") if columns >= _LEAST_TEXT else ""


@click.command("show", short_help="Show what is known about a model.")
@click.argument("name", metavar="NAME", shell_complete=names_known)
def show(name: str) -> int:
    """Show the files of a model on this machine, or where to get one that can be pulled."""
    entry = entries().get(name.lower().partition(":")[0])
    if is_known(name) or entry is None:
        _show_here(name)
    if entry is not None:
        _show_entry(entry)
        if not is_known(name):
            say(f"get it: edgespec pull {entry.name}")
    return 0


@click.command("add", short_help="Register a model file or folder that is already here.")
@click.argument("path", type=FilePath(), metavar="PATH")
@click.option("--name", default="", help="Name of the model.  [default: that of the file or folder]")
@click.option("--draft", type=FilePath(), metavar="FILE", help="Its draft model")
def add(path: Path, name: str, draft: Path | None) -> int:
    """Give a GGUF or ONNX model a name. The file stays where it is; it is tried and its checksum is kept."""
    chosen = add_model(path, name, draft)
    say(f"added: {run_command(chosen, resolve(chosen).files['target'])}")
    return 0


@click.command("rm", short_help="Remove a pulled or added model.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=names_here)
def rm(names: tuple[str, ...]) -> int:
    """Remove models from your models folder, unfinished downloads too. Files that were added stay where they are."""
    for name in names:
        freed = remove(name)
        say(f"removed: {name}" + (f", {freed / 1e6:.1f} MB" if freed else "; its files stay where they are"))
    return 0


def _show_here(name: str) -> None:
    pair = resolve(name)
    for file in pair.files.values():
        if file.is_gguf:
            check_gguf(file.path)
    say(f"{pair.name}: {printable(pair.description) or 'on this machine'}")
    for role, file in (*pair.files.items(), *((f"{kind} heads", file) for kind, file in pair.heads.items())):
        size = sum(part.bytes or part.path.stat().st_size for part in file.all_files)
        parts = f", {len(file.all_files)} files" if file.parts else ""
        say(f"{role}: {file.path}, {size / 1e6:.1f} MB{parts}")
    for label, text in (("licence", pair.licence), ("source", pair.source)):
        if text:
            say(f"{label}: {printable(text)}")
    draft = drafted_from(pair)
    _show_fit(pair_bytes(pair), has_draft=bool(draft))
    say(
        f"run it: {run_command(name, pair.files['target'])}"
        + ("" if draft else f"; drafts for it: edgespec pair {quoted(name)}")
    )


def _show_entry(entry: Entry) -> None:
    say(f"{entry.name}: {entry.description}, {entry.parameters / 1e9:.3g} billion weights")
    say(f"source: {entry.repo}, {entry.quant} (licence: {entry.licence}; tokenizer family: {entry.family})")
    if entry.draft:
        say(f"draft: {entry.draft}, {entries()[entry.draft].description}")
    for head in entry.heads:
        say(f"{head.kind} head: {head.repo} (licence: {head.licence or 'not known'}), convert it with: {head.command}")
    if entry.advice:
        say(f"advice: {entry.advice}")
    say(f"verified: {entry.verified or 'no; nobody has tried this entry with edgespec yet'}")
    if not is_known(entry.name):
        _show_fit(entry_bytes(entry), has_draft=bool(entry.draft), is_guess=not entry.known_bytes)


def _show_fit(num_bytes: int, *, has_draft: bool, is_guess: bool = False) -> None:
    answer = {True: "fits", False: "does not fit", None: "unknown whether it fits"}[fits(num_bytes)]
    size = f"{'about ' if is_guess else ''}{num_bytes / 1e9:.2f} GB{' with its draft' if has_draft else ''}"
    say(f"size: {size}; {answer} into the memory that is available now")


def _size(each: Listed) -> str:
    return f"{'~' if each.is_guess else ''}{each.bytes / 1e9:.2f} GB"

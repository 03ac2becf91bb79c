"""`edgespec distill`: train a small draft for a target from the target's own outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from edgespec.cli import FilePath
from edgespec.cli.main import INTERRUPTED
from edgespec.cli.shell import files
from edgespec.cli.terminal import note
from edgespec.export.training.request import (
    DEVICES,
    LOSSES,
    PRECISIONS,
    WEIGHT_TYPES,
    DistillRequest,
    flag,
    parse_init,
    require_libraries,
)
from edgespec.platform.files import write_errors

_SIZES = {
    "layers": "Layers of the draft.  [default: a quarter of the target's]",
    "hidden": "Width of the draft.  [default: half the target's, in steps of 64]",
    "heads": "Attention heads.  [default: width / 64]",
    "kv_heads": "Heads for keys and values.  [default: half the heads or less]",
    "ffn": "Width of the feed-forward layers.  [default: 3 x width]",
}
NUMBERS = {
    "rounds": "Maximum number of rounds of writing and learning.",
    "round_tokens": "Tokens learnt from per round.",
    "round_prompts": "Texts that the target writes per round.",
    "reply_tokens": "Maximum number of tokens in each.",
    "window": "Tokens per row of a batch.",
    "batch_tokens": "Tokens per step of learning.",
    "generated_share": "Share of the target's own text in a batch; the rest is data.",
    "share": "Share of cross-entropy in the loss; no effect with kl.",
    "held_out_prompts": "Unseen prompts on which acceptance is measured.",
    "patience": "Rounds without improvement before training stops.",
    "min_rise": "Smallest improvement of acceptance that counts.",
    "rate": "Factor on the learning rates.",
    "seed": "The same seed gives the same weights on one machine.",
}
CHOICES = {
    "loss": (LOSSES, "Distance to the target: total variation or Kullback-Leibler."),
    "precision": (PRECISIONS, "Precision of the forward passes; bf16 halves the target's memory."),
    "device": (DEVICES, "Device to train on."),
    "weights": (WEIGHT_TYPES, "Type of the finished weights."),
}
_DEFAULTS = DistillRequest(Path(), Path())


def _request_options(function: Callable[..., int]) -> Callable[..., int]:
    """An option for every field of the request that is a plain value."""
    for name, text in reversed({**_SIZES, **NUMBERS}.items()):
        kind = float if isinstance(getattr(_DEFAULTS, name), float) else int
        function = option(_DEFAULTS, name, kind, text)(function)
    for name, (allowed, text) in reversed(CHOICES.items()):
        function = option(_DEFAULTS, name, click.Choice(allowed), text)(function)
    return function


def option(
    defaults: DistillRequest, name: str, kind: Any, text: str
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A flag for one field of a request."""
    default = getattr(defaults, name)
    return click.option(flag(name), name, type=kind, default=default, show_default=default is not None, help=text)


@click.command()
@click.argument("target", shell_complete=files)
@click.option(
    "--data",
    type=FilePath(),
    multiple=True,
    metavar="FILE",
    help='Text, or .jsonl or .jsonl.xz with "text" or "messages"; repeatable. Without it: text written by the target.',
)
@click.option("-o", "--output", type=FilePath(), help="Folder to create.  [default: TARGET's name-draft]")
@click.option("--init", metavar="layers:N,N", help="Start from these layers of a Llama-like target.")
@_request_options
@click.option("--restart", is_flag=True, help="Begin anew: discard an unfinished run.")
def command(
    target: str, data: tuple[Path, ...], output: Path | None, init: str | None, restart: bool, **given: Any
) -> int:
    """Train a draft for TARGET, a Hugging Face folder or hub id: it learns from text that the target writes.

    Use the finished folder with `edgespec export TARGET --draft FOLDER`. A stopped run continues when
    the same command is given again.
    """
    from edgespec.export.hub import find_source
    from edgespec.export.training.preparation import prepare

    source = find_source(target)
    output = output or Path(f"{source.name}-draft")
    request = DistillRequest(source.folder, output, data, init=parse_init(init) if init else (), **given)
    prepared = prepare(request, source.name)
    return run_resumably(source, prepared, lambda journal: _run(prepared, journal, target), restart=restart)


def run_resumably(source: Any, prepared: Any, run: Callable[[Any], int], *, restart: bool) -> int:
    """Fetch what is missing of `source` and `run` a training with its journal; an interrupt says how to continue."""
    from edgespec.export.training.journal import check_output
    from edgespec.export.workspace import locked

    require_libraries()
    output = prepared.request.output
    check_output(output)
    with write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    with locked(output.with_name(f".{output.name}.partial.lock"), output):
        source.fetch(lambda name, num_bytes: note(f"fetching {name}, {num_bytes / 2**20:.0f} MiB"))
        journal = prepared.open_journal(restart=restart)
        try:
            return run(journal)
        except KeyboardInterrupt:
            note(f"interrupted: the same command continues from the last finished round, stored in {journal.folder}")
            return INTERRUPTED


def _run(prepared: Any, journal: Any, target: str) -> int:
    from edgespec.export.training.on_policy import distill

    with progress(prepared.request.total_tokens) as (say, advance):
        done = distill(prepared, journal, say, advance)
    best = done.best
    note(f"ended: {done.reason}; kept: round {best.index}")
    click.echo(
        f"{done.folder}: acceptance {best.acceptance:.3f} (greedy {best.greedy:.3f}, sampled {best.sampled:.3f})"
    )
    click.echo(f"next: edgespec export {target} --draft {done.folder}")
    return 0


@contextmanager
def progress(total_tokens: int) -> Iterator[tuple[Callable[[str], None], Callable[[int, str], None]]]:
    """(say a line, advance the bar by tokens): a bar on stderr where that is a terminal, lines alone elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total_tokens)

        def say(text: str) -> None:
            if console.is_terminal:
                progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
            else:
                note(text)

        yield say, lambda tokens, text: progress.update(task, advance=tokens, description=text)

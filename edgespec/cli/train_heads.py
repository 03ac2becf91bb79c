"""`edgespec train-heads`: train Medusa heads or an EAGLE head for a target from the target's own outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from edgespec.cli import FilePath
from edgespec.cli.distill import CHOICES, NUMBERS, option, progress, run_resumably
from edgespec.cli.shell import files
from edgespec.cli.terminal import note
from edgespec.export.training.heads_request import KINDS, STORAGE, HeadsRequest, parse_layers

_SIZES = {
    "depth": "Tokens of a draft that it learns to predict.",
    "layers": "Residual blocks per Medusa head.  [default: 1]",
    "heads": "Attention heads of EAGLE's layer.  [default: the target's]",
    "kv_heads": "Its heads for keys and values.  [default: the target's]",
    "ffn": "Width of its feed-forward part.  [default: 2 x width]",
    "draft_vocabulary": "Maximum number of tokens that can be drafted: the most frequent ones.",
    "frequent": "Of these, how many are always scored; others once they occur.  [default: all]",
}
_NUMBERS = {name: text for name, text in NUMBERS.items() if name != "seed"}
_CHOICES = {name: given for name, given in CHOICES.items() if name != "weights"}
_DEFAULTS = HeadsRequest(Path(), Path())


def _request_options(function: Callable[..., int]) -> Callable[..., int]:
    for name, text in reversed({**_SIZES, **_NUMBERS, "seed": NUMBERS["seed"]}.items()):
        kind = float if isinstance(getattr(_DEFAULTS, name), float) else int
        function = option(_DEFAULTS, name, kind, text)(function)
    for name, (allowed, text) in reversed({**_CHOICES, "storage": (STORAGE, "Type of the finished matrices.")}.items()):
        function = option(_DEFAULTS, name, click.Choice(allowed), text)(function)
    return function


@click.command()
@click.argument("target", shell_complete=files)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    required=True,
    help="Medusa: independent heads; EAGLE: one head.",
)
@click.option(
    "--data",
    type=FilePath(),
    multiple=True,
    metavar="FILE",
    help='Text, or .jsonl or .jsonl.xz with "text" or "messages"; repeatable. Without it: text written by the target.',
)
@click.option("-o", "--output", type=FilePath(), help="File to create.  [default: TARGET's name-KIND.npz]")
@_request_options
@click.option(
    "--read-layers",
    default="",
    metavar="N,N",
    callback=lambda _, __, text: parse_layers(text),
    help="Also read the inputs of these layers of the target, such as 3,14,24.",
)
@click.option("--restart", is_flag=True, help="Begin anew: discard an unfinished run.")
def command(target: str, data: tuple[Path, ...], output: Path | None, restart: bool, **given: Any) -> int:
    """Train heads for TARGET, a Hugging Face folder or hub id, that draft from its last hidden state.

    Use the finished file with `--heads FILE` and any GGUF or ONNX file of that target. A stopped run
    continues when the same command is given again.
    """
    from edgespec.export.hub import find_source
    from edgespec.export.training.heads_request import heads_shape
    from edgespec.export.training.preparation import prepare

    source = find_source(target)
    output = output or Path(f"{source.name}-{given['kind']}.npz")
    request = HeadsRequest(source.folder, output, data, **given)
    prepared = prepare(request, source.name, heads_shape)
    return run_resumably(source, prepared, lambda journal: _run(prepared, journal, target), restart=restart)


def _run(prepared: Any, journal: Any, target: str) -> int:
    from edgespec.export.training.heads import train_heads

    with progress(prepared.request.total_tokens) as (say, advance):
        done = train_heads(prepared, journal, say, advance)
    best, request = done.best, prepared.request
    note(f"ended: {done.reason}; kept: round {best.index}")
    lengths = (1 + request.depth * share for share in (best.greedy, best.sampled))
    click.echo("{}: tokens per pass at draft length {}: {:.2f} greedy, {:.2f} sampled".format(
        done.folder, request.depth, *lengths
    ))  # fmt: skip
    click.echo(
        f"next: edgespec generate MODEL --heads {done.folder} --drafter {request.kind}, where MODEL is made "
        f"from {target}"
    )
    return 0

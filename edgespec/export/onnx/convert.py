"""Exports a Hugging Face folder to a folder with an ONNX graph, with an exporter that supports the architecture.

edgespec's own writer needs no torch; the other exporters run in child processes. All write to a folder `NAME.tmp`,
which is renamed at the end. This module does not compare logits with transformers; its caller does.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edgespec.errors import CapabilityError, ConfigError, ModelFileError
from edgespec.export.onnx import exporters
from edgespec.export.onnx.source import Source, open_source
from edgespec.formats.checkpoint import unsupported
from edgespec.installation import install_command
from edgespec.platform.files import atomic_folder
from edgespec.types import Progress, no_progress

if TYPE_CHECKING:
    from edgespec.export.onnx.draft_vocabulary import DraftVocabulary

Quant = Literal["int4", "int8", "w8a8", "q8_0", "q4_k_m", "fp16", "fp32"]
Exporter = Literal["auto", "edgespec", "builder", "transformers", "optimum"]
ONNX_QUANTS: tuple[Quant, ...] = ("int4", "int8", "w8a8", "q8_0", "q4_k_m", "fp16", "fp32")
EXPORTERS: tuple[Exporter, ...] = ("auto", "edgespec", "builder", "transformers", "optimum")
# What edgespec's own writer writes: types, and architectures by Hugging Face's names.
TILED = ("q8_0", "q4_k_m")  # for our own kernels
FORMS = ("w8a8", "int8", "int4", "fp32", *TILED)
WRITABLE = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
    *("Qwen3ForCausalLM", "SmolLM3ForCausalLM", "Gemma3ForCausalLM"),
)
GROUP_SIZES = (16, 32, 64, 128, 256)
# int8 products of ONNX Runtime take 7 to 14% less time with groups of 64 than of 32, most at the 2 to 8 rows of a
# verifying pass. Groups of 128 are faster still, but use a kernel whose bits depend on the width of a pass, so output
# would not be reproducible. 4-bit weights need the accuracy of small groups.
DEFAULT_GROUP_SIZES = {"int8": 64, "w8a8": 64, "int4": 32}
GROUPED = ("down_proj",)  # of w8a8: what loses most in whole numbers, for the least time (docs/benchmarks/speed.md)
HEAD_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class OnnxExport:
    """The result. `path`: model.onnx; `files`: size in bytes of every file of its folder, by name."""

    path: Path
    architecture: str
    exporter: str
    files: dict[str, int]


def export_onnx(
    folder: Path,
    output: Path,
    quant: Quant,
    *,
    group_size: int | None = None,
    exporter: Exporter = "auto",
    grouped: Collection[str] = GROUPED,
    vocabulary: DraftVocabulary | None = None,
    progress: Progress = no_progress,
) -> OnnxExport:
    """Export the model of `folder` to the folder `output`, atomically.

    `group_size`: number of weights that share a scale; None: 64 in int8, 32 in int4; w8a8 has groups in the embeddings
    (64), and edgespec's own writer also in the matrices `grouped`. `vocabulary`: the tokens of a draft that edgespec
    writes. `progress(done, total, step)`.
    Raises ConfigError for a bad option, ModelFileError for a folder that is incomplete, damaged or not supported,
    CapabilityError for a missing package, StateError if the output cannot be written.
    """
    group_size = DEFAULT_GROUP_SIZES.get(quant, GROUP_SIZES[-1]) if group_size is None else group_size
    _check_options(quant, group_size, exporter)
    check_folder(output)
    source = open_source(folder)
    chosen = _choose(source, exporter, quant)
    with atomic_folder(output) as partial:
        if chosen == "edgespec":
            _write(source, partial, quant, group_size, grouped, vocabulary, progress)
        else:
            _run_exporter(chosen, source, partial, quant, group_size, progress)
            source.copy_companions(partial)
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    progress(1, 1, "done")
    return OnnxExport(output / "model.onnx", source.architecture, chosen, files)


def check_folder(output: Path) -> None:
    """Raise ModelFileError unless `output` is new, empty or an older export, which is replaced."""
    is_ours = output.is_dir() and ((output / "model.onnx").is_file() or not any(output.iterdir()))
    if output.exists() and not is_ours:
        raise ModelFileError(f"{output} exists and is not an ONNX export: give a folder that does not exist")


def _check_options(quant: str, group_size: int, exporter: str) -> None:
    if quant not in ONNX_QUANTS:
        raise ConfigError(f"no ONNX weight type {quant!r}: allowed: {', '.join(ONNX_QUANTS)}")
    if exporter not in EXPORTERS:
        raise ConfigError(f"no exporter {exporter!r}: allowed: {', '.join(EXPORTERS)}")
    if group_size not in GROUP_SIZES:
        raise ConfigError(f"group size {group_size} is not possible: allowed: {', '.join(map(str, GROUP_SIZES))}")


def choose_exporter(architecture: str, exporter: Exporter = "auto", quant: str = "int8") -> Exporter:
    """The exporter for an architecture and a type of weights. Raises ConfigError for one that lacks the type."""
    if quant in TILED and exporter not in ("auto", "edgespec"):
        raise ConfigError(f"the exporter {exporter!r} does not write {quant}, edgespec's own does: omit --exporter")
    if exporter != "auto":
        return exporter
    if quant in TILED or (architecture in WRITABLE and quant in FORMS):
        return "edgespec"
    return "builder" if architecture in exporters.ARCHITECTURES else "transformers"


def check_architecture(name: object, architecture: str, exporter: str) -> None:
    """Raise ModelFileError for a model that no exporter is known to write; one that is named may try it."""
    known = dict.fromkeys((*WRITABLE, *exporters.ARCHITECTURES, *exporters.TRACED))
    if exporter == "auto" and architecture not in known:
        raise unsupported(name, architecture, "ONNX", known)


def require_exporter(exporter: Exporter) -> None:
    """Raise CapabilityError if a package of the exporter is missing. Optimum has an environment of its own."""
    own = {"builder": ("onnxruntime_genai",), "transformers": ("onnxscript",)}.get(exporter, ())
    needed = (*own, "torch", "transformers") if own else own
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise CapabilityError(f"the ONNX exporter {exporter!r} needs {', '.join(missing)}: {install_command('export')}")


def _choose(source: Source, exporter: Exporter, quant: str) -> Exporter:
    check_architecture(source.folder, source.architecture, exporter)
    chosen = choose_exporter(source.architecture, exporter, quant)
    if chosen == "builder" and source.head_size % HEAD_MULTIPLE:
        raise ModelFileError(
            f"this {source.architecture} has attention heads of {source.head_size} values; ONNX Runtime's rotary "
            f"attention needs a multiple of {HEAD_MULTIPLE}: export it as GGUF"
        )
    require_exporter(chosen)
    return chosen


def _write(
    source: Source,
    partial: Path,
    quant: str,
    group_size: int,
    grouped: Collection[str],
    vocabulary: DraftVocabulary | None,
    report: Progress,
) -> None:
    from edgespec.export.onnx.from_hub import convert_hub
    from edgespec.export.onnx.hub_model import open_hub

    convert_hub(open_hub(source.folder), partial, quant, group_size, report, grouped=grouped, vocabulary=vocabulary)


def _run_exporter(
    chosen: Exporter,
    source: Source,
    partial: Path,
    quant: Quant,
    group_size: int,
    report: Progress,
) -> None:
    if chosen == "builder":
        order = exporters.builder_order(source.folder, partial, quant, group_size, architecture=source.architecture)
        exporters.build(order, source.layers, report)
        if quant == "w8a8":
            from edgespec.export.onnx.integer import to_integer

            to_integer(partial, group_size, lambda done, total: report(done, total, "quantising products"))
        if quant == "int8" and source.is_tied:
            from edgespec.export.onnx.tied import share_embedding

            share_embedding(partial)
        shutil.rmtree(partial / "cache", ignore_errors=True)
        return
    if chosen == "transformers":
        exporters.trace(source, partial, quant, group_size, report)
        return
    from edgespec.export.onnx.optimum_env import export_with_optimum

    export_with_optimum(source, partial, quant, group_size, report)

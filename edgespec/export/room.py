"""Whether disk and memory suffice for an export, estimated from headers alone before it begins.

Estimates are upper limits: weights by the quantisation's bits per weight, and embedding tables that are not quantised
at their full size.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.export.hub import Source
from edgespec.export.reference import PROBE_TOKENS, has_transformers
from edgespec.export.request import STRAIGHT_GGUF, TILED, ExportRequest, Format
from edgespec.formats.architectures import is_tied
from edgespec.formats.checkpoint import Checkpoint, named_architecture
from edgespec.formats.gguf.model import GgufModel
from edgespec.formats.hub_folder import read_json
from edgespec.platform.memory import free_memory

# Bits per weight, block scales included; for mixtures, of their heavier tensors.
BITS = {
    "f32": 32, "fp32": 32, "f16": 16, "bf16": 16,
    "q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.8, "q5_k_s": 5.6, "q5_1": 6, "q5_0": 5.6,
    "q4_k_m": 5, "q4_k_s": 4.7, "q4_1": 5.1, "q4_0": 4.7, "iq4_nl": 4.7, "iq4_xs": 4.5,
    "q3_k_l": 4.4, "q3_k_m": 4.1, "q3_k_s": 3.7, "q2_k": 3.4,
    "iq3_m": 4, "iq3_s": 3.8, "int8": 9, "int4": 6.5,
}  # fmt: skip
PROGRAM_BYTES = 400 * 2**20  # the interpreter and its libraries
TORCH_BYTES = 500 * 2**20
SPARE = 1.05


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of one model from its headers. A tied embedding table is counted once.

    `num_parameters`, `table_parameters` (input embedding) and `largest_parameters` (largest tensor) are numbers of
    weights; `stored_bytes`: size on disk; `context_length`: tokens.
    """

    architecture: str
    num_parameters: int
    table_parameters: int
    largest_parameters: int
    stored_bytes: int
    num_layers: int
    vocabulary_size: int
    context_length: int | None

    def output_bytes(self, wanted: Format, quant: str) -> int:
        weights = self.num_parameters * BITS[quant] / 8
        if wanted == "onnx":  # with an embedding table of its own, which only some types quantise
            weights += self.table_parameters * (1.1 if quant in TILED else 4)
        return round(weights * SPARE)


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on the disks of the output and of the hub's cache, and peak memory."""

    output_bytes: int
    temporary_bytes: int
    download_bytes: int
    memory_bytes: int


def facts_of_gguf(model: GgufModel) -> Facts:
    config = model.config
    return Facts(
        architecture=model.kind.hub,
        num_parameters=model.num_parameters,
        table_parameters=config.vocab_size * config.hidden_size,
        largest_parameters=config.hidden_size * max(config.vocab_size, config.intermediate_size),
        stored_bytes=model.header.data_bytes,
        num_layers=config.num_layers,
        vocabulary_size=config.vocab_size,
        context_length=config.max_positions,
    )


def read_facts(source: Source) -> Facts:
    """Facts of a model: exact if its weights are fetched, else estimated from the file sizes.

    Raises ModelFileError if config.json cannot be read or a safetensors file is truncated or corrupt.
    """
    config = read_json(source.folder / "config.json")
    kind = named_architecture(config)
    nested = config.get("text_config")
    text = {**config, **(nested if isinstance(nested, dict) else {})}
    stored = sum(source.weights.values())
    table = _number(text, "vocab_size") * _number(text, "hidden_size", "n_embd")
    sizes = _estimated_sizes(text, stored, table) if source.missing else _sizes(Checkpoint.open(source.folder))
    return Facts(
        architecture=kind,
        num_parameters=sum(sizes.values()),
        table_parameters=table,
        largest_parameters=max(sizes.values()),
        stored_bytes=stored,
        num_layers=_number(text, "num_hidden_layers", "n_layer"),
        vocabulary_size=_number(text, "vocab_size"),
        context_length=_number(text, "max_position_embeddings", "n_positions", "n_ctx") or None,
    )


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Number of weights by tensor, without a head that is tied to the embeddings."""
    sizes = {name: math.prod(checkpoint.shape(name)) for name in checkpoint.names()}
    if not sizes:
        raise ModelFileError(f"{checkpoint.folder} has no tensors")
    if is_tied(checkpoint.architecture, checkpoint.config) and len(sizes) > 1:
        sizes.pop("lm_head.weight", None)
    return sizes


def _estimated_sizes(config: Mapping[str, Any], stored_bytes: int, table: int) -> dict[str, int]:
    width = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
    return {"table": table, "others": max(stored_bytes // width - table, 0)}


def _number(config: Mapping[str, Any], *keys: str) -> int:
    found = next((config[key] for key in keys if isinstance(config.get(key), int)), 0)
    return int(found)


def needs_of(request: ExportRequest, models: Mapping[str, Facts], download_bytes: int = 0) -> Needs:
    """Needs of an export of `models`, by role, which are made one after the other."""
    outputs, temporary, memory = 0, [0], [0]
    for role, facts in models.items():
        sizes = {wanted: facts.output_bytes(wanted, request.quant_of(role, wanted)) for wanted in request.formats}
        outputs += sum(sizes.values())
        temporary.append(_temporary_bytes(request, role, facts))
        memory.append(PROGRAM_BYTES + 12 * facts.largest_parameters)
        if request.exporter == "optimum":
            memory.append(PROGRAM_BYTES + TORCH_BYTES + 8 * facts.num_parameters)
        if request.check:
            with_torch = "gguf" in request.formats or (not request.is_gguf and has_transformers())
            opened = TORCH_BYTES + 4 * facts.num_parameters if with_torch else max(*sizes.values(), facts.stored_bytes)
            memory.append(PROGRAM_BYTES + opened + 8 * PROBE_TOKENS * facts.vocabulary_size)
    heads = 0 if request.heads is None else request.heads.stat().st_size
    return Needs(outputs + heads, max(temporary), download_bytes, max(memory))


def _temporary_bytes(request: ExportRequest, role: str, facts: Facts) -> int:
    """The files between: a folder's weights as a GGUF, its blocks for a graph, or Optimum's graph."""
    found = 0
    if "gguf" in request.formats and request.quant_of(role, "gguf") not in STRAIGHT_GGUF:
        found = 2 * facts.num_parameters
    if "onnx" in request.formats:
        if request.exporter == "optimum":
            return found + 4 * facts.num_parameters
        found = 0 if request.is_gguf else max(facts.stored_bytes, found)
        quant = request.quant_of(role, "onnx")
        found += facts.output_bytes("gguf", quant) if quant in TILED else 0
    return found


def check_room(needs: Needs, output: Path, cache: Path | None) -> None:
    """Raise CapabilityError with needed and available bytes if disk or memory do not suffice."""
    parent = _existing(output)
    places = {parent: needs.output_bytes + needs.temporary_bytes}
    if cache is not None and needs.download_bytes:
        shared = _existing(cache)
        same = next((place for place in places if place.stat().st_dev == shared.stat().st_dev), shared)
        places[same] = places.get(same, 0) + needs.download_bytes
    for place, needed in places.items():
        free = free_bytes(place)
        if needed > free:
            raise CapabilityError(
                f"not enough disk: the export needs {human(needed)} in {place}, {human(free)} are free. Free space, "
                "choose another disk with -o, or a smaller --quant"
            )
    available = free_memory()
    if available is not None and needs.memory_bytes > available:
        raise CapabilityError(
            f"not enough memory: the export needs {human(needs.memory_bytes)}, {human(available)} are available. Close "
            "other programs, or skip the comparison with transformers by --no-check"
        )


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def free_bytes(place: Path) -> int:
    return shutil.disk_usage(place).free


def human(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"

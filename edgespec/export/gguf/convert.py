"""Hugging Face folder -> GGUF, through the `gguf` package alone: no torch, one tensor in memory at a time.

What the converter does not know: quantisation other than the types of OUTPUT_TYPES (`quantise` makes the rest),
Unigram and WordPiece tokenizers, vision towers, mixtures of experts.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf.quants import quantize

from edgespec.errors import ModelFileError
from edgespec.export.checkpoint import Checkpoint, Weights
from edgespec.export.gguf.architectures import architecture_of
from edgespec.export.gguf.hyperparameters import write_hyperparameters
from edgespec.export.gguf.layers import canonical_name, layer_number
from edgespec.export.gguf.rotary import llama3_frequency_factors, rotary_settings
from edgespec.export.gguf.rows import TRANSPOSE, Architecture, Sizes, Tensor
from edgespec.export.gguf.tokenizer import write_tokenizer
from edgespec.export.gguf.transforms import apply
from edgespec.export.reporting import Progress, no_progress
from edgespec.formats.files import atomic_file

OutputType = Literal["f32", "f16", "bf16", "q8_0"]
OUTPUT_TYPES: dict[OutputType, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
# Not weights: masks and frequencies that old checkpoints carry along.
BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")


@dataclass(frozen=True)
class Conversion:
    """What was written. `types` counts tensors by stored type: rows that no block fits fall back to another."""

    path: Path
    architecture: str
    types: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor to be written: its place in the checkpoint and what it becomes."""

    source: str
    tensor: Tensor
    shape: tuple[int, ...]


def convert(
    source: Path | Checkpoint,
    output: Path,
    output_type: OutputType = "q8_0",
    *,
    name: str | None = None,
    licence: str | None = None,
    progress: Progress = no_progress,
) -> Conversion:
    """Write a model, opened or the folder of one, to `output` as GGUF; norms stay F32.

    Raises ModelFileError when the folder is incomplete or holds something this converter does not know, StateError
    when `output` cannot be written. The output appears only when it is whole.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    found = architecture_of(checkpoint)
    sizes = found.sizes(checkpoint)
    plan = plan_tensors(checkpoint, found, sizes)
    quantisation, file_type = OUTPUT_TYPES[output_type]
    with atomic_file(output) as temporary:
        writer = gguf.GGUFWriter(temporary, found.name)
        try:
            writer.add_name(name or checkpoint.folder.name)
            if licence is not None:
                writer.add_license(licence)
            writer.add_file_type(file_type)
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            write_hyperparameters(writer, checkpoint, found, sizes)
            write_tokenizer(writer, checkpoint, sizes.vocabulary)
            extra = _extra_tensors(checkpoint, sizes)
            types = _write_tensors(writer, checkpoint, found, sizes, plan, extra, quantisation, progress)
        finally:
            writer.close()
    return Conversion(output, found.name, types)


def plan_tensors(checkpoint: Checkpoint, found: Architecture, sizes: Sizes) -> dict[str, Planned]:
    """GGUF name -> what it comes from, in the checkpoint's order.

    Raises ModelFileError for a tensor that is missing, unknown, or of another shape than config.json implies.
    """
    is_tied = bool(checkpoint.config.get("tie_word_embeddings", found.head_is_tied or False))
    if found.head_is_tied and not is_tied:
        raise ModelFileError(f"{checkpoint.folder}: llama.cpp's {found.name} takes the embeddings as its output head")
    plan: dict[str, Planned] = {}
    for source in checkpoint.names():
        if source.endswith(BUFFERS) or (is_tied and source == "lm_head.weight"):
            continue
        name, tensor = _place(checkpoint, found, sizes, source)
        expected = sizes.shape(tensor.shape)
        if checkpoint.shape(source) != expected:
            raise ModelFileError(
                f"{checkpoint.tensors[source].file}: tensor {source} has the shape {checkpoint.shape(source)}, "
                f"config.json implies {expected}"
            )
        plan[name] = Planned(source, tensor, expected[::-1] if tensor.change == TRANSPOSE else expected)
    _check_complete(checkpoint, found, sizes, plan, is_tied)
    return plan


def _place(checkpoint: Checkpoint, found: Architecture, sizes: Sizes, source: str) -> tuple[str, Tensor]:
    """(GGUF name, row of the architecture's table) of one of the checkpoint's tensors."""
    name = canonical_name(found, source)
    if name in found.outer:
        return found.outer[name].name, found.outer[name]
    place = layer_number(found, name)
    if place is not None and place[1] in found.layer and place[0] < sizes.layers:
        tensor = found.layer[place[1]]
        return f"blk.{place[0]}.{tensor.name}", tensor
    file = checkpoint.tensors[source].file
    raise ModelFileError(f"{file}: tensor {source} has no place in a {found.name} GGUF of {sizes.layers} layers")


def _check_complete(
    checkpoint: Checkpoint, found: Architecture, sizes: Sizes, plan: dict[str, Planned], is_tied: bool
) -> None:
    needed = {tensor.name: source for source, tensor in found.outer.items() if not tensor.is_optional}
    if not is_tied:
        needed["output.weight"] = "lm_head.weight"
    for layer in range(sizes.layers):
        for rest, tensor in found.layer.items():
            if not tensor.is_optional:
                needed[f"blk.{layer}.{tensor.name}"] = f"{found.layer_prefix}{layer}.{rest}"
    missing = [source for name, source in needed.items() if name not in plan]
    if missing:
        raise ModelFileError(f"{checkpoint.folder} lacks {len(missing)} tensors, the first is {missing[0]}")


def _extra_tensors(checkpoint: Checkpoint, sizes: Sizes) -> dict[str, Weights]:
    """Tensors that the checkpoint does not have, by GGUF name."""
    settings = rotary_settings(checkpoint.config)
    if settings["rope_type"] == "llama3":
        return {"rope_freqs.weight": llama3_frequency_factors(settings, sizes.head_dim)}
    return {}


def stored_type(shape: tuple[int, ...], wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _write_tensors(
    writer: gguf.GGUFWriter,
    checkpoint: Checkpoint,
    found: Architecture,
    sizes: Sizes,
    plan: dict[str, Planned],
    extra: dict[str, Weights],
    wanted: gguf.GGMLQuantizationType,
    progress: Progress,
) -> dict[str, int]:
    """Describe all tensors, write the header, then stream the data. Returns the number of tensors by stored type."""
    shapes = {name: planned.shape for name, planned in plan.items()} | {n: w.shape for n, w in extra.items()}
    stored = {name: stored_type(shape, wanted) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[stored[name]]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), math.prod(shape) // block * block_bytes, stored[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, name in enumerate(shapes):
        progress(done, len(shapes), name)
        weights = extra[name] if name in extra else _weights(checkpoint, found, sizes, plan[name])
        writer.write_tensor_data(quantised(weights, stored[name], name))
    progress(len(shapes), len(shapes), "done")
    return dict(Counter(kind.name for kind in stored.values()))


def _weights(checkpoint: Checkpoint, found: Architecture, sizes: Sizes, planned: Planned) -> Weights:
    weights = checkpoint.weights(planned.source)
    if not np.isfinite(_extremes(weights)).all():
        file = checkpoint.tensors[planned.source].file
        raise ModelFileError(f"{file}: tensor {planned.source} holds infinite numbers or NaN. Download it again")
    return apply(planned.tensor.change, weights, checkpoint, found, sizes)


def quantised(weights: Weights, kind: gguf.GGMLQuantizationType, name: str) -> Any:
    if kind == gguf.GGMLQuantizationType.F16 and np.abs(_extremes(weights)).max() > np.finfo(np.float16).max:
        raise ModelFileError(f"tensor {name} has numbers beyond what f16 holds; export it as bf16 or f32")
    return quantize(weights, kind)


def _extremes(weights: Weights) -> Weights:
    """[smallest, largest], which are NaN where any number is: a large tensor has no room for a copy."""
    with np.errstate(invalid="ignore"):
        return np.array([weights.min(), weights.max()], np.float32)

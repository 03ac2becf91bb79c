"""Converts a Hugging Face folder to GGUF with the `gguf` package (no torch, one tensor in memory at a time), and
quantises GGUF files with llama.cpp.

Not supported: Unigram and WordPiece tokenizers, vision models, mixtures of experts.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from edgespec.engines.llamacpp.library import complaints, forget_complaints, library, uninterrupted
from edgespec.errors import ModelFileError
from edgespec.export.gguf.tokenizer import write_tokenizer
from edgespec.formats.architectures import (
    TRANSPOSE,
    Architecture,
    Sizes,
    Tensor,
    apply,
    architecture_of,
    layer_kinds,
    llama3_frequency_factors,
    rotary_settings,
    window_frequency_base,
    window_of,
)
from edgespec.formats.checkpoint import BUFFERS, Checkpoint, Weights, full_config, settings_of
from edgespec.formats.gguf.check import check_gguf
from edgespec.platform.files import atomic_file
from edgespec.platform.machine import physical_cores
from edgespec.types import Progress, no_progress

HEAD = "lm_head.weight"
_BIASES = {"mlp.": "mlp_bias", "self_attn.": "attention_bias"}  # what config.json calls those that are optional


Tensors = dict[str, tuple[tuple[int, ...], Callable[[], Weights]]]
"""GGUF name -> (shape, function that returns the weights)."""


def convert(
    folder: Path,
    output: Path,
    output_type: str = "q8_0",
    *,
    name: str | None = None,
    licence: str | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write the model in `folder` to `output` as GGUF, atomically: f32, f16, bf16 or q8_0; norms are F32.

    Raises ModelFileError if the folder is incomplete or not supported, StateError if `output` cannot be written.
    """
    checkpoint = Checkpoint.open(folder)
    with settings_of(folder):
        found = architecture_of(checkpoint)
        sizes = found.sizes(checkpoint)
        tensors = plan_tensors(checkpoint, found, sizes) | rotary_tensors(checkpoint, sizes)

    called = name or folder.name
    wanted = gguf.GGMLQuantizationType[output_type.upper()]
    stored = {tensor: stored_type(shape, wanted) for tensor, (shape, _) in tensors.items()}
    with atomic_file(output) as temporary:
        writer = gguf.GGUFWriter(temporary, found.name)
        try:
            writer.add_name(called)
            if licence is not None:
                writer.add_license(licence)
            writer.add_file_type(FILE_TYPES[output_type])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            with settings_of(folder):
                write_hyperparameters(writer, checkpoint, found, sizes)
            write_tokenizer(writer, checkpoint, sizes.vocabulary)
            for tensor, (shape, _) in tensors.items():
                block, block_bytes = gguf.GGML_QUANT_SIZES[stored[tensor]]
                size = math.prod(shape) // block * block_bytes
                writer.add_tensor_info(tensor, shape, np.dtype(np.float32), size, stored[tensor])
            writer.write_header_to_file()
            try:
                writer.write_kv_data_to_file()
            except (OverflowError, struct.error) as exc:
                raise ModelFileError(f"{called} has a setting that GGUF cannot hold: {exc}") from exc
            writer.write_ti_data_to_file()
            for done, (tensor, (_, load)) in enumerate(tensors.items()):  # one in memory at a time
                progress(done, len(tensors), tensor)
                writer.write_tensor_data(_quantised(load(), stored[tensor], tensor))
            progress(len(tensors), len(tensors), "done")
        finally:
            writer.close()
    return output


def check_checkpoint(folder: Path, *, has_weights: bool) -> None:
    """Check a model as far as its files are there, before anything is written.

    Raises ModelFileError for a model that cannot be converted.
    """
    checkpoint = Checkpoint.open(folder) if has_weights else Checkpoint(folder, full_config(folder), {})
    with settings_of(folder):
        found = architecture_of(checkpoint)
        if has_weights:
            plan_tensors(checkpoint, found, found.sizes(checkpoint))


def plan_tensors(checkpoint: Checkpoint, found: Architecture, sizes: Sizes) -> Tensors:
    """The tensors to write, in the checkpoint's order.

    Raises ModelFileError for a tensor that is missing, unknown, or has another shape than config.json implies.
    """
    if found.head_is_tied and not found.is_tied(checkpoint.config):
        raise ModelFileError(f"{checkpoint.folder}: llama.cpp's {found.name} needs tied embeddings, but they are not")
    needed, plan = dict(_places(checkpoint, found, sizes.layers)), Tensors()
    for source in checkpoint.tensors:
        if source.endswith(BUFFERS) or (source == HEAD and found.is_tied(checkpoint.config)):
            continue
        # Checkpoints saved from the bare model lack the prefix.
        name = source if source.startswith((found.optional_prefix, "lm_head.")) else found.optional_prefix + source
        where = f"{checkpoint.tensors[source].file}: tensor {source}"
        if name not in needed:
            raise ModelFileError(f"{where} has no place in a {found.name} model of {sizes.layers} layers")
        (tensor, own), shape = needed.pop(name), checkpoint.tensors[source].shape
        if shape != (wanted := sizes.shape(tensor.shape)):
            raise ModelFileError(f"{where} has the shape {shape}, config.json implies {wanted}")
        checkpoint.check_type(source)
        load = partial(_weights, checkpoint, sizes, source, tensor.change)
        plan[own] = shape[::-1] if tensor.change == TRANSPOSE else shape, load
    if needed:
        raise ModelFileError(f"{checkpoint.folder} lacks {len(needed)} tensors, the first is {next(iter(needed))}")
    return plan


def _places(checkpoint: Checkpoint, found: Architecture, layers: int) -> Iterator[tuple[str, tuple[Tensor, str]]]:
    """(name, (row of the table, GGUF name)) of every tensor that there must be."""
    for name, tensor in found.outer.items():
        if name != HEAD or not found.is_tied(checkpoint.config):
            yield name, (tensor, tensor.name)
    flags = {rest: flag for rest in found.layer for begin, flag in _BIASES.items() if rest.startswith(begin)}
    for layer in range(layers):
        for rest, tensor in found.layer.items():
            if not tensor.is_optional or checkpoint.config.get(flags[rest]):
                yield f"{found.layer_prefix}{layer}.{rest}", (tensor, f"blk.{layer}.{tensor.name}")


def rotary_tensors(checkpoint: Checkpoint, sizes: Sizes) -> Tensors:
    """The frequency factors of Llama 3.1's rotary positions, computed from config.json."""
    settings = rotary_settings(checkpoint.config)
    if settings["rope_type"] != "llama3":
        return {}
    factors = llama3_frequency_factors(settings, sizes.head_dim)
    return {"rope_freqs.weight": (factors.shape, lambda: factors)}


def stored_type(shape: tuple[int, ...], wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _weights(checkpoint: Checkpoint, sizes: Sizes, source: str, change: int) -> Weights:
    weights = checkpoint.weights(source)
    checkpoint.check_finite(source, _extremes(weights))
    return apply(change, weights, sizes)


def _quantised(weights: Weights, kind: gguf.GGMLQuantizationType, name: str) -> Any:
    if kind == gguf.GGMLQuantizationType.F16 and np.abs(_extremes(weights)).max() > np.finfo(np.float16).max:
        raise ModelFileError(f"tensor {name} has values outside the range of f16; export it as bf16 or f32")
    return quantize(weights, kind)


def _extremes(weights: Weights) -> Weights:
    """[smallest, largest]; NaN if any element is. Avoids a copy of the tensor."""
    with np.errstate(invalid="ignore"):
        return np.array([weights.min(), weights.max()], np.float32)


# the settings of config.json as the metadata that llama.cpp reads for an architecture


def write_hyperparameters(writer: gguf.GGUFWriter, checkpoint: Checkpoint, found: Architecture, sizes: Sizes) -> None:
    windowed = layer_kinds(checkpoint, found, sizes.layers)
    writer.add_block_count(sizes.layers)
    writer.add_context_length(_context_length(checkpoint, found, sizes, windowed))
    writer.add_embedding_length(sizes.width)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    epsilon = float(checkpoint.require(found.norm_epsilon))
    if found.norm_epsilon == "layer_norm_epsilon":
        writer.add_layer_norm_eps(epsilon)
    else:
        writer.add_key_length(sizes.head_dim)
        writer.add_value_length(sizes.head_dim)
        _write_rotary(writer, checkpoint, sizes)
        writer.add_layer_norm_rms_eps(epsilon)
    writer.add_vocab_size(sizes.vocabulary)
    if any(windowed):
        _write_window(writer, checkpoint, found, windowed)
    if found.has_window and (cap := checkpoint.config.get("final_logit_softcapping")) is not None:
        writer.add_final_logit_softcapping(float(cap))


def _context_length(checkpoint: Checkpoint, found: Architecture, sizes: Sizes, windowed: list[bool]) -> int:
    """The context length, limited to the window if llama.cpp has no sliding window for this architecture."""
    window = window_of(checkpoint)
    if any(windowed) and not found.has_window and window is not None:
        return min(sizes.context, window)
    return sizes.context


def _write_rotary(writer: gguf.GGUFWriter, checkpoint: Checkpoint, sizes: Sizes) -> None:
    settings = rotary_settings(checkpoint.config)
    writer.add_rope_dimension_count(sizes.head_dim)
    writer.add_rope_freq_base(float(settings["rope_theta"]))
    if settings["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(settings["factor"]))


def _write_window(writer: gguf.GGUFWriter, checkpoint: Checkpoint, found: Architecture, windowed: list[bool]) -> None:
    window = window_of(checkpoint)
    if window is None:
        raise ModelFileError(f"{checkpoint.folder / 'config.json'} has sliding layers but no sliding_window")
    writer.add_sliding_window(window)
    if found.has_window:
        writer.add_sliding_window_pattern(windowed)
    base = window_frequency_base(checkpoint.config)
    if found.has_window and base is not None:
        writer.add_rope_freq_base_swa(base)


# -- quantising, by llama.cpp. Types that it writes with an importance matrix only are left to its own programs

_QUANTISED = (
    *("q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "iq4_nl", "iq4_xs"),
    *("q3_k_l", "q3_k_m", "q3_k_s", "iq3_m", "iq3_s", "q2_k"),
)
GGUF_QUANTS = ("f32", "f16", "bf16", *_QUANTISED)
_FILE_TYPE_NAMES = {name: f"{'ALL' if name == 'f32' else 'MOSTLY'}_{name.upper()}" for name in GGUF_QUANTS}
FILE_TYPES = {name: int(gguf.LlamaFileType[theirs]) for name, theirs in _FILE_TYPE_NAMES.items()}


def own_precision(folder: Path) -> str:
    """The smallest type that stores a checkpoint's weights without loss."""
    kinds = {tensor.dtype for tensor in Checkpoint.open(folder).tensors.values() if len(tensor.shape) > 1}
    return {"F16": "f16", "BF16": "bf16"}.get(kinds.pop(), "f32") if len(kinds) == 1 else "f32"


def quantise(
    source: Path, output: Path, quant: str, *, threads: int | None = None, may_requantise: bool = False
) -> None:
    """Quantise a GGUF of f32, f16 or bf16 to one of FILE_TYPES; rows that its blocks do not divide get another type.

    `may_requantise`: the source may be quantised, too. Raises ModelFileError with
    llama.cpp's message, StateError if the disk is full.
    """
    check_gguf(source)
    llama = library()
    params = llama.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[quant]
    params.nthread = threads or physical_cores()
    params.allow_requantize = may_requantise
    forget_complaints()
    with atomic_file(output) as temporary:
        names = os.fsencode(source), os.fsencode(temporary)
        if uninterrupted(lambda: llama.llama_model_quantize(*names, ctypes.byref(params)), lambda _: None):
            raise _failure(source, temporary)


def _failure(source: Path, temporary: Path) -> Exception:
    reason = complaints()
    if "iostream" in reason or "basic_ios" in reason:
        return OSError(None, "the disk is full or the file may not grow", str(temporary))
    return ModelFileError(f"{source} cannot be quantised by llama.cpp: {reason}")

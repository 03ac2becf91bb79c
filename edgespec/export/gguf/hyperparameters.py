"""Writes the settings of config.json as the metadata that llama.cpp reads for an architecture."""

from __future__ import annotations

import gguf

from edgespec.errors import ModelFileError
from edgespec.formats.architectures import (
    Architecture,
    Sizes,
    layer_kinds,
    rotary_settings,
    window_frequency_base,
    window_of,
)
from edgespec.formats.checkpoint import Checkpoint


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
    _write_softcapping(writer, checkpoint, found)


def _context_length(checkpoint: Checkpoint, found: Architecture, sizes: Sizes, windowed: list[bool]) -> int:
    """The context length, limited to the window if llama.cpp has no sliding window for this architecture."""
    window = window_of(checkpoint)
    if any(windowed) and not found.has_window and window is not None:
        return min(sizes.context, window)
    return sizes.context


def _write_rotary(writer: gguf.GGUFWriter, checkpoint: Checkpoint, sizes: Sizes) -> None:
    settings = rotary_settings(checkpoint.config)
    if float(settings.get("partial_rotary_factor", checkpoint.config.get("partial_rotary_factor")) or 1.0) != 1.0:
        raise ModelFileError(f"{checkpoint.folder} has partial_rotary_factor below 1, which is not supported")
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


def _write_softcapping(writer: gguf.GGUFWriter, checkpoint: Checkpoint, found: Architecture) -> None:
    """Write logit softcapping of Gemma 2 and 3; llama.cpp requires it for Gemma 2."""
    if found.name not in ("gemma2", "gemma3"):
        return
    attention, final = (checkpoint.config.get(f"{part}_logit_softcapping") for part in ("attn", "final"))
    if found.name == "gemma2" and (attention is None or final is None):
        raise ModelFileError(f"{checkpoint.folder / 'config.json'} lacks attn_logit_softcapping or the final one")
    if attention is not None:
        writer.add_attn_logit_softcapping(float(attention))
    if final is not None:
        writer.add_final_logit_softcapping(float(final))

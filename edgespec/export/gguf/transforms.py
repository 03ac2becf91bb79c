"""The numbers of one tensor, as llama.cpp wants them."""

from __future__ import annotations

import numpy as np

from edgespec.export.checkpoint import Checkpoint, Weights
from edgespec.export.gguf.rows import (
    ADD_ONE,
    PERMUTE_K,
    PERMUTE_Q,
    SCALE_Q,
    SCALE_Q_NORM,
    TRANSPOSE,
    Architecture,
    Sizes,
)


def interleave_rotary(weights: Weights, heads: int) -> Weights:
    """Rows [heads * head_dim, ...] from Hugging Face's (first half, second half) to pairs side by side."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def attention_factor(checkpoint: Checkpoint, found: Architecture, sizes: Sizes) -> float:
    """By what queries must be multiplied: Gemma's config names a scale, llama.cpp knows one by the model's shape."""
    wanted = float(checkpoint.config.get("query_pre_attn_scalar") or sizes.head_dim)
    is_fixed = sizes.layers == found.fixed_attention_scale_layers
    built_in = sizes.width // sizes.heads if is_fixed else sizes.head_dim
    return float((built_in / wanted) ** 0.5)


def apply(change: int, weights: Weights, checkpoint: Checkpoint, found: Architecture, sizes: Sizes) -> Weights:
    if change == PERMUTE_Q:
        return interleave_rotary(weights, sizes.heads)
    if change == PERMUTE_K:
        return interleave_rotary(weights, sizes.kv_heads)
    if change == TRANSPOSE:
        return np.ascontiguousarray(weights.T)
    if change == ADD_ONE:
        return weights + np.float32(1)
    if change in (SCALE_Q, SCALE_Q_NORM):
        shifted = weights + np.float32(1) if change == SCALE_Q_NORM else weights
        factor = attention_factor(checkpoint, found, sizes)
        return shifted if factor == 1 else shifted * np.float32(factor)
    return weights

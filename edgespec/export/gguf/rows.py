"""What an architecture is made of: its tensors and what happens to their numbers, sizes, peculiarities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgespec.export.checkpoint import Checkpoint, Weights

# What happens to the numbers of a tensor on its way; see `apply`.
AS_IS, PERMUTE_Q, PERMUTE_K, ADD_ONE, TRANSPOSE, SCALE_Q, SCALE_Q_NORM = range(7)


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` as letters: d hidden, f inner, q query rows, k key rows, h head, v vocabulary, c context, 3d = 3 x d."""

    name: str
    shape: str
    change: int = AS_IS
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of a config that shapes follow from, by the names transformers gives them in most models."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int

    def shape(self, letters: str) -> tuple[int, ...]:
        """'q d' -> (heads * head_dim, width)."""
        numbers = {
            "d": self.width,
            "f": self.inner,
            "q": self.heads * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "h": self.head_dim,
            "v": self.vocabulary,
            "c": self.context,
            "3d": 3 * self.width,
        }
        return tuple(numbers[letter] for letter in letters.split())


def read_sizes(checkpoint: Checkpoint) -> Sizes:
    count, config = checkpoint.count, checkpoint.config
    heads = count("num_attention_heads")
    return Sizes(
        layers=count("num_hidden_layers"),
        width=count("hidden_size"),
        inner=count("intermediate_size"),
        heads=heads,
        kv_heads=count("num_key_value_heads") if config.get("num_key_value_heads") else heads,
        head_dim=count("head_dim") if config.get("head_dim") else count("hidden_size") // heads,
        vocabulary=count("vocab_size"),
        context=count("max_position_embeddings"),
    )


def read_gpt2_sizes(checkpoint: Checkpoint) -> Sizes:
    count = checkpoint.count
    width, heads = count("n_embd"), count("n_head")
    inner = count("n_inner") if checkpoint.config.get("n_inner") else 4 * width
    return Sizes(
        count("n_layer"), width, inner, heads, heads, width // heads, count("vocab_size"), count("n_positions")
    )


@dataclass(frozen=True)
class Architecture:
    """How one kind of model is written.

    `name` is llama.cpp's; `outer` and `layer` are its tensors by Hugging Face's name, those of a layer after
    `layer_prefix` and the layer's number; `must` lists the allowed values of settings that llama.cpp has built in;
    `head_is_tied` None leaves that to config.json.
    """

    name: str
    outer: Mapping[str, Tensor]
    layer: Mapping[str, Tensor]
    layer_prefix: str = "model.layers."
    optional_prefix: str = "model."
    norm_epsilon: str = "rms_norm_eps"
    sizes: Callable[[Checkpoint], Sizes] = read_sizes
    must: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    head_is_tied: bool | None = None
    rope_kinds: tuple[str, ...] = ("default", "linear")
    has_window: bool = False
    window_pattern: int = 0  # without layer_types: every n-th layer sees everything
    fixed_attention_scale_layers: int = 0  # at this depth llama.cpp scales attention by width / heads


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

"""Types that describe an architecture: tensor table, sizes, special settings; and transformations of tensor values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgespec.errors import ModelFileError
from edgespec.formats.checkpoint import Checkpoint, Weights

# Transformations of a tensor's values, done by `apply`.
AS_IS, PERMUTE_Q, PERMUTE_K, ADD_ONE, TRANSPOSE, SCALE_Q, SCALE_Q_NORM = range(7)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A row of the tensor table. `shape` in letters: d hidden, f inner, q query rows, k key rows, h head size,
    v vocabulary, c context, 3d = 3 x d.
    """

    name: str
    shape: str
    change: int = AS_IS
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes in config.json that determine tensor shapes."""

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
    head_dim = count("head_dim") if config.get("head_dim") else count("hidden_size") // heads
    if head_dim % 2:
        raise ModelFileError(
            f"{checkpoint.folder / 'config.json'} has heads of {head_dim} numbers; allowed: an even one"
        )
    return Sizes(
        layers=count("num_hidden_layers"),
        width=count("hidden_size"),
        inner=count("intermediate_size"),
        heads=heads,
        kv_heads=count("num_key_value_heads") if config.get("num_key_value_heads") else heads,
        head_dim=head_dim,
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
    """How one architecture is converted.

    `name`: llama.cpp's name; `outer`: tensors outside the layers by Hugging Face name; `layer`: those of a layer by the
    rest of the name after `layer_prefix` and number; `must`: allowed values of settings that llama.cpp hard-codes;
    `head_is_tied` None: as config.json says, and `ties_by_default` where that says nothing.
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
    ties_by_default: bool = False
    rope_kinds: tuple[str, ...] = ("default", "linear")
    has_window: bool = False
    window_pattern: int = 0  # without layer_types: every n-th layer has full attention
    fixed_attention_scale_layers: int = 0  # at this number of layers llama.cpp scales attention by width / heads

    def is_tied(self, settings: Mapping[str, Any]) -> bool:
        """Whether the output projection is the embedding matrix; some configs leave out what transformers implies."""
        return bool(settings.get("tie_word_embeddings", self.head_is_tied or self.ties_by_default))


def interleave_rotary(weights: Weights, heads: int) -> Weights:
    """Reorder rows [heads * head_dim, ...] from Hugging Face's two halves to interleaved rotary pairs."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def attention_factor(checkpoint: Checkpoint, found: Architecture, sizes: Sizes) -> float:
    """Factor for the queries: Gemma's config gives an attention scale, llama.cpp derives it from the model's shape."""
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

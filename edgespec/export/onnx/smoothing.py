"""Smooths weights for w8a8: large channels of a product's inputs are divided by scales, its weights multiplied.

w8a8 quantises the inputs of a product with one scale a row, so that one large channel leaves few codes to all others.
SmoothQuant (arXiv:2211.10438) equation 4 divides channel j by max|x_j|^a / max|w_j|^(1-a). Nothing is added to the
graph: norms, value projections and up projections, which make these inputs, take the division. Queries that share keys
and values share scales, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from edgespec.formats.onnx.forms import HEAD, RowWeights
from edgespec.formats.onnx.llama_config import LlamaConfig

ALPHA = 0.5
_LEAST = 1e-5  # of a channel's largest input or weight, so that empty channels get no extreme scale
Floats = NDArray[np.float32]
Largest = Mapping[str, Floats]


class SmoothedWeights:
    """`RowWeights` that compute what `weights` do, but are easier to quantise.

    `largest` [inputs]: the largest magnitude of each input of a product, by the name of one of its matrices.
    `smooths_head`: not for one that is read as the embedding, too.
    """

    def __init__(
        self, weights: RowWeights, config: LlamaConfig, largest: Largest, *, smooths_head: bool = True
    ) -> None:
        self._weights, self._config = weights, config
        self.is_tied = weights.is_tied
        self._read_by: dict[str, Floats] = {}  # by matrix: scales of its inputs
        self._made_by: dict[str, Floats] = {}  # by norm, bias or matrix: scales of its outputs
        for layer in range(config.num_layers):
            self._smooth_layer(f"model.layers.{layer}", largest)
        if smooths_head:
            self._smooth("model.norm.weight", (HEAD,), largest)

    def _smooth_layer(self, layer: str, largest: Largest) -> None:
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        before = "pre_feedforward" if self._config.has_post_norms else "post_attention"
        self._smooth(f"{layer}.input_layernorm.weight", _names(attention, "q", "k", "v"), largest)
        self._smooth(f"{layer}.{before}_layernorm.weight", _names(mlp, "gate", "up"), largest)
        self._smooth(f"{attention}.v_proj", _names(attention, "o"), largest, shares_heads=True)
        self._smooth(f"{mlp}.up_proj", _names(mlp, "down"), largest)

    def _smooth(self, maker: str, readers: tuple[str, ...], largest: Largest, *, shares_heads: bool = False) -> None:
        inputs = largest[readers[0]]
        weights = np.maximum.reduce([self._largest_weights(name) for name in readers])
        if shares_heads:
            inputs, weights = self._of_shared_heads(inputs), self._of_shared_heads(weights)
        scales = np.maximum(inputs, _LEAST) ** ALPHA / np.maximum(weights, _LEAST) ** (1 - ALPHA)
        scales = (scales / np.exp(np.log(scales).mean())).astype(np.float32)
        self._made_by |= {maker: scales, f"{maker}.weight": scales, f"{maker}.bias": scales}
        self._read_by |= dict.fromkeys(readers, self._for_all_heads(scales) if shares_heads else scales)

    def _largest_weights(self, name: str) -> Floats:
        """[inputs]: the largest magnitude in each column of a matrix."""
        found = np.zeros(self._weights.shape(name)[1], np.float32)
        for rows in self._weights.rows(name):
            np.maximum(found, np.abs(rows).max(axis=0), out=found)
        return found

    def _of_shared_heads(self, values: Floats) -> Floats:
        """The largest among the heads that share a value head: [value heads * head size] of [heads * head size]."""
        found: Floats = values.reshape(self._config.num_kv_heads, -1, self._config.head_dim).max(axis=1).reshape(-1)
        return found

    def _for_all_heads(self, scales: Floats) -> Floats:
        config = self._config
        heads = scales.reshape(config.num_kv_heads, 1, config.head_dim)
        return np.repeat(heads, config.num_heads // config.num_kv_heads, axis=1).reshape(-1)

    @property
    def hidden_scales(self) -> Floats | None:
        """What the hidden states behind the final norm are divided by [width]; None where they are not."""
        return self._made_by.get("model.norm.weight")

    def vector(self, name: str) -> Floats:
        found = self._weights.vector(name)
        return found / self._made_by[name] if name in self._made_by else found

    def shape(self, name: str) -> tuple[int, int]:
        return self._weights.shape(name)

    def rows(self, name: str) -> Iterator[Floats]:
        read, made = self._read_by.get(name), self._made_by.get(name)
        start = 0
        for rows in self._weights.rows(name):
            found = rows if read is None else rows * read
            yield found if made is None else found / made[start : start + len(rows), None]
            start += len(rows)


def _names(place: str, *kinds: str) -> tuple[str, ...]:
    return tuple(f"{place}.{kind}_proj.weight" for kind in kinds)

"""The layer of an EAGLE head in numpy float32: what that of an engine is checked against, and the one for head sizes
that no engine takes.

There is one layer, so earlier pairs need only their keys and values.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.states import Array, silu
from edgespec.engines.head import HeadLayer, NewPairs, Pairs, frequencies_of, rotary_tables
from edgespec.formats.head_file import PROJECT, HeadFile

_UNSEEN = np.float32(-math.inf)  # a score of attention


class NumpyLayer(HeadLayer):
    """Reads the arrays of `heads` where they are, without copying the large ones."""

    def __init__(self, heads: HeadFile) -> None:
        self._sizes, self._frequencies = heads.manifest, frequencies_of(heads)
        self._arrays = dict(heads.arrays)
        self._queries_keys_values = np.concatenate([self._arrays.pop(f"{name}_proj") for name in "qkv"])
        self._scored_rows, self._scale = heads.frequent_rows, np.float32(heads.manifest.scale)
        self._epsilon = np.float32(heads.manifest.norm_eps)
        own = [*self._arrays.values(), self._queries_keys_values]
        own += [] if self._scored_rows is heads.vocabulary else [self._scored_rows]
        self.num_bytes = sum(array.nbytes for array in own)

    def fuse(self, features: Array) -> Array:
        found: Array = features @ self._arrays[PROJECT].T
        return found

    def read(self, pairs: Pairs, new: NewPairs) -> tuple[Array, Array]:
        first, count, sizes = pairs.length, len(new.states), self._sizes
        x, found = self._before(new.states, new.embedded)
        found = found.reshape(count, -1, sizes.head_dim)  # queries, keys, values
        cos, sin = (table[:, None] for table in rotary_tables(self._frequencies, new.positions))
        rotated = _rotated(found[:, : -sizes.kv_heads], cos, sin)
        place = slice(first, first + count)
        pairs.keys[0, :, place] = rotated[:, sizes.heads :].swapaxes(0, 1)
        pairs.values[0, :, place] = found[:, -sizes.kv_heads :].swapaxes(0, 1)
        seen = np.tri(count, first + count, first, dtype=np.bool_)
        asked = slice(count - new.scored, count)
        seen = (seen if new.sees is None else seen & new.sees)[asked]
        attended = self._attended(rotated[asked, : sizes.heads], pairs, seen)
        pairs.length += count
        return self._after(x[asked], attended)

    def _attended(self, queries: Array, pairs: Pairs, sees: NDArray[np.bool_]) -> Array:
        """Attention of `queries` [n, heads, size] over the pairs that each `sees` [n, pairs]: [n, heads * size]."""
        sizes, (count, length) = self._sizes, sees.shape
        grouped = queries.reshape(count, sizes.kv_heads, -1, sizes.head_dim).swapaxes(0, 1)
        rows = grouped.reshape(sizes.kv_heads, -1, sizes.head_dim)  # of one pair the heads of a group follow each other
        scores = rows @ pairs.keys[0, :, :length].swapaxes(1, 2) / np.float32(math.sqrt(sizes.head_dim))
        scores = np.where(sees.repeat(rows.shape[1] // count, axis=0), scores, _UNSEEN)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        found: Array = (weights @ pairs.values[0, :, :length]).reshape(grouped.shape).swapaxes(0, 1).reshape(count, -1)
        return found

    def _before(self, states: Array, embedded: Array) -> tuple[Array, Array]:
        """What the layer starts with [n, width]; queries, keys and values side by side, not rotated."""
        x = np.concatenate((states, embedded), axis=1) @ self._arrays["fc"].T
        return x, self._normed(x, "attention_norm") @ self._queries_keys_values.T

    def _behind_layer(self, x: Array, attended: Array) -> Array:
        arrays = self._arrays
        x = x + attended @ arrays["o_proj"].T
        normed = self._normed(x, "mlp_norm")
        inner: Array = silu(normed @ arrays["gate_proj"].T) * (normed @ arrays["up_proj"].T)
        return x + inner @ arrays["down_proj"].T

    def _after(self, x: Array, attended: Array) -> tuple[Array, Array]:
        found = self._normed(self._behind_layer(x, attended), "norm")
        return found, (found @ self._scored_rows.T) * self._scale

    def _normed(self, x: Array, name: str) -> Array:
        found: Array = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + self._epsilon)
        return found * self._arrays[name]

    def close(self) -> None:
        """Does nothing: there are only arrays to free."""


class NumpyFusedLayer(NumpyLayer):
    """The layer of an EAGLE-3 head."""

    def fuse(self, features: Array) -> Array:
        found = self._normed(features, "feature_norm") if self._sizes.norms_features else features
        fused: Array = found @ self._arrays["fc"].T
        return fused

    def _before(self, states: Array, embedded: Array) -> tuple[Array, Array]:
        normed = self._normed(states, "state_norm")
        joined = np.concatenate((self._normed(embedded, "embedding_norm"), normed), axis=1)
        return normed if self._sizes.norms_residual else states, joined @ self._queries_keys_values.T

    def _after(self, x: Array, attended: Array) -> tuple[Array, Array]:
        """The states are those before the last norm: the layer goes on with them."""
        states = self._behind_layer(x, attended)
        return states, (self._normed(states, "norm") @ self._scored_rows.T) * self._scale


def numpy_layer(heads: HeadFile) -> NumpyLayer:
    """The layer of `heads` of the kind eagle, of any generation."""
    return (NumpyFusedLayer if heads.manifest.generation == 3 else NumpyLayer)(heads)


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions in Hugging Face's half-split order: x [..., heads, size]; cos, sin [..., 1, size / 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    found = np.empty_like(x)
    np.subtract(first * cos, second * sin, out=found[..., :half])
    np.add(second * cos, first * sin, out=found[..., half:])
    return found

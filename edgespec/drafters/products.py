"""The matrix products of an EAGLE head in numpy float32: what quantised products of an engine are checked against."""

from __future__ import annotations

import numpy as np

from edgespec.drafters.scored import Array
from edgespec.drafters.states import silu
from edgespec.engines.head import LayerProducts
from edgespec.formats.head_file import PROJECT, HeadFile


class NumpyProducts(LayerProducts):
    """Reads the arrays of `heads` where they are, without copying the large ones."""

    def __init__(self, heads: HeadFile) -> None:
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

    def before(self, states: Array, embedded: Array) -> tuple[Array, Array]:
        x = np.concatenate((states, embedded), axis=1) @ self._arrays["fc"].T
        return x, self._normed(x, "attention_norm") @ self._queries_keys_values.T

    def _behind_layer(self, x: Array, attended: Array) -> Array:
        arrays = self._arrays
        x = x + attended @ arrays["o_proj"].T
        normed = self._normed(x, "mlp_norm")
        inner: Array = silu(normed @ arrays["gate_proj"].T) * (normed @ arrays["up_proj"].T)
        return x + inner @ arrays["down_proj"].T

    def after(self, x: Array, attended: Array) -> tuple[Array, Array]:
        found = self._normed(self._behind_layer(x, attended), "norm")
        return found, (found @ self._scored_rows.T) * self._scale

    def _normed(self, x: Array, name: str) -> Array:
        found: Array = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + self._epsilon)
        return found * self._arrays[name]

    def close(self) -> None:
        """Does nothing: there are only arrays to free."""


class NumpyLayerProducts(NumpyProducts):
    """The products of an EAGLE-3 head."""

    def __init__(self, heads: HeadFile) -> None:
        super().__init__(heads)
        self._manifest = heads.manifest

    def fuse(self, features: Array) -> Array:
        found = self._normed(features, "feature_norm") if self._manifest.norms_features else features
        fused: Array = found @ self._arrays["fc"].T
        return fused

    def before(self, states: Array, embedded: Array) -> tuple[Array, Array]:
        normed = self._normed(states, "state_norm")
        pairs = np.concatenate((self._normed(embedded, "embedding_norm"), normed), axis=1)
        return normed if self._manifest.norms_residual else states, pairs @ self._queries_keys_values.T

    def after(self, x: Array, attended: Array) -> tuple[Array, Array]:
        """The states are those before the last norm: the layer goes on with them."""
        states = self._behind_layer(x, attended)
        return states, (self._normed(states, "norm") @ self._scored_rows.T) * self._scale

"""EAGLE-3 (arXiv 2503.01840) over the target's states: a head that reads the inputs of several layers, fused into one.

Drafts, trees and the cache are those of `eagle`; the head has an embedding of its own, and its layer goes on with the
state before the last norm. `edgespec export TARGET --draft HEAD --to onnx` makes its file.
"""

from __future__ import annotations

import numpy as np

from edgespec.drafters.eagle import EagleDrafter
from edgespec.drafters.head_layer import numpy_layer
from edgespec.drafters.scored import Array
from edgespec.engines.head import HeadLayer
from edgespec.formats.head_file import HeadFile
from edgespec.types import TokenIds


class LayersEagleDrafter(EagleDrafter):
    """`heads` of generation 3; without a `layer` numpy computes it in float32."""

    def __init__(
        self,
        heads: HeadFile,
        vocabulary_size: int,
        end_ids: frozenset[int],
        given_layers: tuple[int, ...] = (),
        layer: HeadLayer | None = None,
    ) -> None:
        # Its layer has the rows of the head, and embeddings come from a table of their own.
        rows = np.zeros((0, heads.manifest.hidden_size), np.float16)
        super().__init__(heads, vocabulary_size, end_ids, given_layers, layer or numpy_layer(heads), rows)
        self._fused_size = heads.manifest.fused_size
        assert heads.embedding is not None
        self._embedding = heads.embedding

    def read(self, features: Array) -> Array:
        if self._columns is not None:
            features = features[:, self._columns]
        return self._layer.fuse(np.ascontiguousarray(features[:, : self._fused_size]))

    def embed(self, token_ids: TokenIds) -> Array:
        return self._embedding.rows(token_ids)

    def scores_behind(self, token_ids: TokenIds, features: Array) -> Array:
        """Scores [the heads' vocabulary] of what follows the text `token_ids` [n], whose `features` [m] are known up to
        the last token but one; the next call overwrites them."""
        return self.row(self._catch_up(token_ids, features, 0)[1])

    @property
    def bytes_used(self) -> int:
        return super().bytes_used + self._embedding.num_bytes

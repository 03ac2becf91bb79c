"""EAGLE-3 heads in llama.cpp: a context of its own, which may share embeddings and head with the target's.

Two properties of llama-cpp-python 0.3.36 matter here. The head's graph computes logits of all rows, of which the
library copies as many as were requested from the first one on, so either all rows are requested or none. And a pass
that encodes needs positions as if it decoded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgespec.engines.head import States
from edgespec.engines.llamacpp.head_context import widest_step
from edgespec.engines.llamacpp.head_file import HeadOfFile
from edgespec.engines.llamacpp.library import library
from edgespec.engines.llamacpp.pair_head import PairHead
from edgespec.formats.gguf.eagle3 import Eagle3Sizes, read_eagle3


class Eagle3Head(HeadOfFile[Eagle3Sizes], PairHead):
    """A head that reads three of the target's layers."""

    what = "EAGLE-3 head"

    @classmethod
    def read(cls, path: Path) -> Eagle3Sizes:
        return read_eagle3(path)

    @classmethod
    def cache_bytes(cls, sizes: Eagle3Sizes, context_length: int) -> int:
        return context_length * sizes.kv_bytes_per_token

    @classmethod
    def pass_bytes(cls, sizes: Eagle3Sizes) -> int:
        """Two copies of the logits and the layer's activations, for the widest pass."""
        row_bytes = 4 * (2 * sizes.vocabulary_size + sizes.num_drafted + sizes.feature_width + 8 * sizes.width)
        return widest_step(sizes.vocabulary_size) * row_bytes

    def encode(self, features: States) -> States:
        self._require_open()
        self._check_features(features)
        self._trim()
        states = np.empty((len(features), self.facts.width), np.float32)
        for start in range(0, len(features), self._step):
            part = np.ascontiguousarray(features[start : start + self._step], np.float32)
            self._rows.fill(self.end, None, part, outputs=True)
            self._run(library().llama_encode, self._rows.struct, len(part))
            states[start : start + len(part)] = self._states(len(part))
        return states

"""DFlash and DSpark heads in llama.cpp: a context of its own, which may share embeddings and head with the target's.

A pass over floats projects features of the target into the head's cache and computes nothing else. A pass over tokens
denoises a block: the last token of the text and mask tokens behind it, which attend to the cache and to one another.
Its graph computes logits of all rows, of which the library copies as many as were requested from the first one on.

A DSpark head moves the scores of each row by the token before it. In the graph this is the likeliest token of the row
before, so that the scores of a row are those of the greedy chain. Where a draft takes another token, the rows behind it
fit less well and fewer of their tokens are accepted; the text stays the target's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.engines.head import BlockHead, Confidences, HeadFacts, States
from edgespec.engines.llamacpp.extensions import extension
from edgespec.engines.llamacpp.head_context import ContextRequest, widest_step
from edgespec.engines.llamacpp.head_file import HeadOfFile
from edgespec.engines.llamacpp.library import library
from edgespec.engines.llamacpp.rows import PairRows
from edgespec.engines.llamacpp.settings import CELLS_MULTIPLE
from edgespec.errors import ContextFull
from edgespec.formats.gguf.dflash import DFlashSizes, read_dflash
from edgespec.types import Logits

_MARKOV_COPIES = 6


class DFlashHead(HeadOfFile[DFlashSizes], BlockHead):
    """A head that drafts a block at once."""

    what = "DFlash head"

    def __init__(self, request: ContextRequest, facts: HeadFacts, sizes: DFlashSizes, owned_model: Any = None) -> None:
        super().__init__(request, facts, sizes.vocabulary_size, owned_model)
        library().llama_set_causal_attn(self._context, sizes.is_causal)
        self._sizes = sizes
        self.most_drafted = sizes.most_drafted
        self._step = widest_pass(sizes)
        self._rows = PairRows(self._step)
        self._block_ids = np.full(sizes.block_size, sizes.mask_id, np.int32)
        if sizes.has_confidence:
            extension("set_states")(self._context, True, True)  # the graph gives confidences in the place of states

    @classmethod
    def read(cls, path: Path) -> DFlashSizes:
        return read_dflash(path)

    @classmethod
    def _made(cls, request: ContextRequest, facts: HeadFacts, sizes: DFlashSizes, model: Any) -> DFlashHead:
        return cls(request, facts, sizes, model)

    @classmethod
    def _refined(cls, request: ContextRequest, sizes: DFlashSizes) -> ContextRequest:
        return replace(request, length=request.length + sizes.block_size, rows=widest_pass(sizes))

    @classmethod
    def cache_bytes(cls, sizes: DFlashSizes, context_length: int) -> int:
        """For `context_length` tokens of text and a block."""
        cells = -(-(context_length + sizes.block_size) // CELLS_MULTIPLE) * CELLS_MULTIPLE
        return cells * sizes.kv_bytes_per_token

    @classmethod
    def pass_bytes(cls, sizes: DFlashSizes) -> int:
        """Logits in the graph and copies of a block's, and activations of a layer, for the widest pass.

        A Markov head works on copies of the block's logits: the number is what was measured.
        """
        rows, row_bytes = widest_pass(sizes), 4 * sizes.vocabulary_size
        in_graph = max(rows, _MARKOV_COPIES * sizes.block_size if sizes.has_markov else 0) * row_bytes
        activations = 4 * rows * (sizes.feature_width + 4 * sizes.width + 3 * sizes.inner_width)
        return in_graph + sizes.block_size * row_bytes + activations

    def _is_sound(self) -> bool:
        """Whether the results of one block behind arbitrary numbers are numbers."""
        self.inject(np.ones((1, self.facts.feature_width), np.float32))
        logits, confidences = self.block(0)
        return bool(np.isfinite(logits.max(axis=1)).all() and (confidences is None or np.isfinite(confidences).all()))

    def inject(self, features: States) -> None:
        self._require_open()
        self._check_features(features)
        room = self.facts.context_length - (self.end - self.start)
        if len(features) > room:
            raise ContextFull(f"the head's context of {self.facts.context_length} has room for {room} more tokens")
        self._trim()
        for start in range(0, len(features), self._step):
            part = np.ascontiguousarray(features[start : start + self._step], np.float32)
            self._rows.fill(self.end, None, part, outputs=False)
            self._run(library().llama_decode, self._rows.struct, len(part))
            self.end += len(part)

    def block(self, token_id: int) -> tuple[Logits, Confidences | None]:
        self._require_open()
        self._check_tokens(token_id)
        self._trim()
        sizes, count = self._sizes, self._sizes.block_size
        self._block_ids[0] = token_id
        self._rows.fill_tokens(self.end, self._block_ids)
        try:
            self._run(library().llama_decode, self._rows.struct, count)
            logits = np.ctypeslib.as_array(library().llama_get_logits(self._context), (count, self._vocabulary_size))
        finally:
            self._trim()  # the rows of the block are guesses
        if not sizes.has_confidence:
            return logits[sizes.first_row :], None
        states = np.ctypeslib.as_array(extension("get_states")(self._context), (count, sizes.width))
        return logits[sizes.first_row :], states[sizes.first_row :, 0]

    def another(self) -> DFlashHead:
        self._require_open()
        found = DFlashHead(self._request, self.facts, self._sizes)
        self._others.append(found)
        return found


def widest_pass(sizes: DFlashSizes) -> int:
    """Rows: a block cannot be divided, since each of its rows attends to all others."""
    return max(widest_step(sizes.vocabulary_size), sizes.block_size)

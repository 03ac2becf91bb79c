"""Medusa (arXiv 2401.10774): one small head per drafted token, all on the target's last hidden state.

A draft costs one multiplication by each head and one by the cut-down vocabulary for all of them together. A head knows
the state and the token that was sampled from it, not what the heads before it propose. `edgespec train-heads --kind
medusa` makes them.
"""

from __future__ import annotations

import numpy as np

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.states import Array, StateDrafter, silu
from edgespec.headfile import HeadFile
from edgespec.types import EMPTY_DRAFT, Draft, TokenIds


class MedusaDrafter(StateDrafter):
    """Drafts as many tokens as there are heads, at most."""

    name = "medusa"

    def __init__(self, heads: HeadFile, vocabulary_size: int, end_ids: frozenset[int]) -> None:
        super().__init__(heads, vocabulary_size, end_ids)
        arrays, depth = heads.arrays, heads.manifest.depth
        # per block: weights [heads, hidden, inputs] and biases [heads, hidden] of all heads
        self._blocks = [
            tuple(np.stack([arrays[f"{kind}.{head}.{block}"] for head in range(depth)]) for kind in ("weight", "bias"))
            for block in range(heads.manifest.blocks)
        ]
        self._arrays = {f"{block}.{part}": each for block, pair in enumerate(self._blocks) for part, each in
                        enumerate(pair)}  # fmt: skip
        self.depth = depth

    def begin(self, prompt_ids: TokenIds) -> None:
        """Nothing of a text is kept."""

    def draft(self, request: DraftRequest) -> Draft:
        """A chain of at most one token per head."""
        most = min(request.max_tokens, self.depth)
        if most < 1 or request.features is None or not len(request.features):
            return EMPTY_DRAFT
        scores = self.scores(self._predicted(self.read(request.features[-1:])[0], request.token_ids[-1:], most))
        rows = iter(scores)
        return self.chain(request, most, lambda _: next(rows))

    def _predicted(self, state: Array, pending_id: TokenIds, count: int) -> Array:
        """The states [count, hidden] that the first heads predict from `state` [hidden]."""
        first = np.concatenate((state, self.embed(pending_id)[0]))
        found: Array = np.broadcast_to(state, (count, state.size))
        for index, (weights, biases) in enumerate(self._blocks):
            given = np.broadcast_to(first, (count, first.size)) if index == 0 else found
            found = found + silu(np.matmul(weights[:count], given[:, :, None])[:, :, 0] + biases[:count])
        return found

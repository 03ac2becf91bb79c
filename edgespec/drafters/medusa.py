"""Medusa (arXiv 2401.10774): one small head per drafted token, all on the target's last hidden state.

A draft costs one multiplication by each head and one by the cut-down vocabulary for all of them together. A head knows
the state and the token that was sampled from it, not what the heads before it propose: the tree of drafts (section
2.1.2) has the same candidates at all nodes of a depth. The paper takes the same paths of that product for all texts;
here each round takes the most probable ones. `scripts/train/heads.py` makes heads.
"""

from __future__ import annotations

import numpy as np

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.growth import Candidates, Growth, MakeCandidates, candidates_for, takes_tree
from edgespec.drafters.states import Array, StateDrafter, silu
from edgespec.formats.head_file import PROJECT, HeadFile
from edgespec.types import Draft, Logits, TokenIds

# Of logits: a head knows no token of its path, so the target differs from it by more than from a model that does.
# Fitted to the demo's heads, greedy and at T=0.8: with a model's 0.6 trees were narrower, and first choices with an
# expected acceptance of .76 were accepted at .54.
_DISAGREEMENT = 1.2


class MedusaDrafter(StateDrafter):
    """Drafts chains of as many tokens as there are heads, at most, and trees of any size that are as deep."""

    name = "medusa"

    def __init__(
        self, heads: HeadFile, vocabulary_size: int, end_ids: frozenset[int], given_layers: tuple[int, ...] = ()
    ) -> None:
        super().__init__(heads, vocabulary_size, end_ids, given_layers, heads.vocabulary)
        arrays, depth = heads.arrays, heads.manifest.depth
        # per block: weights [heads, hidden, inputs] and biases [heads, hidden] of all heads
        self._blocks = [
            tuple(np.stack([arrays[f"{kind}.{head}.{block}"] for head in range(depth)]) for kind in ("weight", "bias"))
            for block in range(heads.manifest.blocks)
        ]
        self._project = arrays.get(PROJECT)
        self._scored_rows, self._scale = heads.frequent_rows, np.float32(heads.manifest.scale)
        self.depth = depth

    @property
    def bytes_used(self) -> int:
        own = [array for block in self._blocks for array in block]
        own += [] if self._project is None else [self._project]
        own += [] if self._scored_rows is self._rows else [self._scored_rows]
        return super().bytes_used + sum(array.nbytes for array in own)

    def projected(self, features: Array) -> Array:
        assert self._project is not None
        found: Array = features @ self._project.T
        return found

    def scores(self, states: Array) -> Array:
        """Logits [n, m] of predicted states [n, hidden size] over the scored tokens."""
        return self._scored.complete(states, (states @ self._scored_rows.T) * self._scale)

    def drafted(self, request: DraftRequest, features: Array) -> Draft:
        """A tree, or a chain of at most one token per head."""
        most = min(request.max_tokens, self.depth)
        scores = self.scores(self._predicted(self.read(features[-1:])[0], request.token_ids[-1:], most))
        rows = iter(scores)
        if takes_tree(request):
            return self._tree(request, scores)
        return self.chain(request, most, lambda _: next(rows))

    def _tree(self, request: DraftRequest, scores: Array) -> Draft:
        """A tree from `scores` [heads, m], one row for all nodes of a depth."""

        def scores_of(growth: Growth) -> Array:
            return scores[[growth.nodes[node].depth + 1 for node in growth.waiting]]

        return self.tree(request, _candidates_for(request), scores[0], scores_of, len(scores))

    def _predicted(self, state: Array, pending_id: TokenIds, count: int) -> Array:
        """The states [count, hidden] that the first heads predict from `state` [hidden]."""
        first = np.concatenate((state, self.embed(pending_id)[0]))
        found: Array = np.broadcast_to(state, (count, state.size))
        for index, (weights, biases) in enumerate(self._blocks):
            given = np.broadcast_to(first, (count, first.size)) if index == 0 else found
            found = found + silu(np.matmul(weights[:count], given[:, :, None])[:, :, 0] + biases[:count])
        return found


def _candidates_for(request: DraftRequest) -> MakeCandidates:
    """The candidates of any tree, but made only once per depth where all its nodes share them."""
    make = candidates_for(request, request.sampler, disagreement=_DISAGREEMENT)
    if request.sampler.uses_history:
        return make
    known: dict[int, Candidates] = {}

    def make_once(logits: Logits, path_ids: TokenIds) -> Candidates:
        if path_ids.size not in known:
            known[path_ids.size] = make(logits, path_ids)
        return known[path_ids.size]

    return make_once

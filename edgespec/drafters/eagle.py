"""EAGLE (arXiv 2401.15077): one layer continues from the target's last hidden state, token by token.

Each step reads a state and the token behind it, and predicts the next state, from which the reduced head scores the
next token. For committed text it reads the target's own states, for its draft those that it predicted itself; only
pairs of the former stay in the cache of keys and values. `edgespec train-heads --kind eagle` makes the head.

Its trees are dynamic (EAGLE-2, arXiv 2406.16858): nodes are read several at a time, each attending to the text and its
own path, and grow best first, which selects the rows that EAGLE-2's ranking selects from a full tree.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.candidates import candidates_for
from edgespec.drafters.growth import ROOT, Growth
from edgespec.drafters.head_layer import numpy_layer
from edgespec.drafters.scored import Array
from edgespec.drafters.states import StateDrafter
from edgespec.engines.head import HeadLayer, NewPairs, Pairs
from edgespec.formats.head_file import HeadFile
from edgespec.types import Draft, TokenIds

WINDOW = 512  # pairs that it looks back at
MOST_READ = 128  # pairs in a pass: scores of attention take memory for each of them and all before


class EagleDrafter(StateDrafter):
    """Drafts chains and trees of any size, from the part of the text whose target states are available.

    `layer` computes the head's and is closed with the drafter; without it numpy does, in float32. `rows`: as
    StateDrafter's; None: the vocabulary as wide as the layer's.
    """

    name = "eagle"

    def __init__(
        self,
        heads: HeadFile,
        vocabulary_size: int,
        end_ids: frozenset[int],
        given_layers: tuple[int, ...] = (),
        layer: HeadLayer | None = None,
        rows: NDArray[np.floating] | None = None,
    ) -> None:
        if rows is None:  # those of a layer in 8 bits are only looked up
            rows = heads.vocabulary if layer is None else heads.vocabulary.astype(np.float16)
        super().__init__(heads, vocabulary_size, end_ids, given_layers, rows)
        self._layer, self._owns_layer = layer or numpy_layer(heads), True
        self._sizes = heads.manifest
        self._begin_cache()

    def _begin_cache(self) -> None:
        self._pairs = Pairs.room(self._sizes, 0)
        self._start = 0  # text position of the first pair that the cache began with
        self._end = 0  # of the first pair that is not in it

    def another(self, sequence: int) -> Self:
        found = super().another(sequence)
        found._owns_layer = False
        found._begin_cache()
        return found

    def begin(self, prompt_ids: TokenIds) -> None:
        super().begin(prompt_ids)
        self._forget(0)

    def _forget(self, position: int) -> None:
        """Begin the cache anew with the pair at a text `position`."""
        self._pairs.length, self._start, self._end = 0, position, position

    def projected(self, features: Array) -> Array:
        return self._layer.fuse(features)

    def num_uncached(self, token_ids: TokenIds) -> int:
        return min(token_ids.size - 1 - self._end, WINDOW)

    def drafted(self, request: DraftRequest, features: Array) -> Draft:
        try:
            self._make_room(len(features) + request.max_tokens)
            state, scores = self._catch_up(request.token_ids, features)
        except BaseException:
            self._forget(0)  # its progress is unknown
            raise
        committed = self._pairs.length
        try:
            make = self._tree if self.grows(request) else self._chain
            return make(request, state, scores)
        finally:
            self._pairs.length = committed  # drops the pairs that it predicted itself

    def _chain(self, request: DraftRequest, state: Array, scores: Array) -> Draft:
        """A chain behind the text; `state` [hidden], `scores` [m]: those predicted at its end."""
        position = self._end

        def scores_after(token_id: int | None) -> Array:
            nonlocal state, scores, position
            if token_id is not None:
                state, scores = self._predicted(state[None], self.embed(np.array([token_id], np.int32)), position)
                position += 1
            return scores

        return self.chain(request, request.max_tokens, scores_after)

    def _tree(self, request: DraftRequest, state: Array, scores: Array) -> Draft:
        """A tree behind the text; the nodes that its growth waits for are read in one batch."""
        committed, states, places = self._pairs.length, {ROOT: state}, dict[int, int]()

        def scores_of(growth: Growth) -> Array:
            waiting, first = growth.waiting, self._pairs.length
            nodes = [growth.nodes[node] for node in waiting]
            places.update(zip(waiting, range(first, first + len(nodes)), strict=True))
            sees = np.zeros((len(nodes), first + len(nodes)), np.bool_)
            sees[:, :committed] = True
            for row, node in enumerate(waiting):
                sees[row, [places[each] for each in growth.path(node)]] = True
            depths = np.array([node.depth for node in nodes])
            embedded = self.embed(np.array([node.candidate.token_id for node in nodes], np.int32))
            above = np.stack([states[node.parent] for node in nodes])
            new = NewPairs(above, embedded, self._end + depths, sees, len(nodes))
            found, scores_found = self._read(new)
            states.update(zip(waiting, found, strict=True))
            return scores_found

        return self.tree(request, candidates_for(request, request.sampler, like_chains=True), scores, scores_of)

    def _catch_up(self, token_ids: TokenIds, states: Array) -> tuple[Array, Array]:
        """Read the pairs that were committed since the last draft; returns the prediction from the last of them."""
        last = token_ids.size - 2  # position of the state that the pending token was sampled from
        first = last + 1 - len(states)
        if not first <= self._end <= last:  # states are missing in between, or the text is asked for again
            self._forget(first)
        for start in range(self._end, last + 1, MOST_READ):
            end = min(start + MOST_READ, last + 1)
            read = self.read(states[start - first : end - first])
            found = self._predicted(read, self.embed(token_ids[start + 1 : end + 1]), start)
            self._end = end
        return found

    def _predicted(self, states: Array, embedded: Array, position: int) -> tuple[Array, Array]:
        """Append the pairs (states [n, hidden], embedded [n, hidden]); the state [hidden] that follows the last one,
        and its scores [m]. `position` of the first pair in the text.
        """
        positions = np.arange(position, position + len(states))
        found, scores = self._read(NewPairs(states, embedded, positions))
        return found[0], scores[0]

    def _read(self, new: NewPairs) -> tuple[Array, Array]:
        """As HeadLayer.read, with positions in the text, and with the scores of all tokens that are scored."""
        found, scores = self._layer.read(self._pairs, new._replace(positions=new.positions - self._start))
        return found, self._scored.complete(found, scores)

    def _make_room(self, count: int) -> None:
        """See that so many pairs fit; the oldest ones go."""
        old = self._pairs
        if old.length + count <= old.keys.shape[2]:
            return
        new, kept = Pairs.room(self._sizes, 2 * WINDOW + count), min(old.length, WINDOW)
        latest = slice(old.length - kept, old.length)
        new.keys[:, :, :kept], new.values[:, :, :kept] = old.keys[:, :, latest], old.values[:, :, latest]
        new.length = kept
        self._pairs = new

    @property
    def bytes_used(self) -> int:
        return super().bytes_used + self._layer.num_bytes + self._pairs.keys.nbytes + self._pairs.values.nbytes

    def close(self) -> None:
        if self._owns_layer:
            self._layer.close()

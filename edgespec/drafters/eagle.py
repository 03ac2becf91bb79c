"""EAGLE (arXiv 2401.15077): one layer continues from the target's last hidden state, token by token.

Each step reads a state and the token behind it, and predicts the next state, from which the reduced head scores the
next token. For committed text it reads the target's own states, for its draft those that it predicted itself; only
pairs of the former stay in the cache of keys and values. There is one layer, so earlier pairs need only their key and
value. `edgespec train-heads --kind eagle` makes the head.

Its trees are dynamic (EAGLE-2, arXiv 2406.16858): nodes are read several at a time, each attending to the text and its
own path, and grow best first, which selects the rows that EAGLE-2's ranking selects from a full tree.
"""

from __future__ import annotations

import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.candidates import candidates_for
from edgespec.drafters.growth import ROOT, Growth
from edgespec.drafters.products import NumpyProducts
from edgespec.drafters.scored import Array
from edgespec.drafters.states import StateDrafter
from edgespec.engines.head import LayerProducts
from edgespec.formats.head_file import HeadFile
from edgespec.types import Draft, TokenIds

WINDOW = 512  # pairs that it looks back at
_UNSEEN = np.float32(-math.inf)  # a score of attention


class EagleDrafter(StateDrafter):
    """Drafts chains and trees of any size, from the part of the text whose target states are available.

    `products` computes the head's layer and is closed with the drafter; without it numpy does, in float32. `rows`: as
    StateDrafter's; None: the vocabulary as wide as the products'.
    """

    name = "eagle"

    def __init__(
        self,
        heads: HeadFile,
        vocabulary_size: int,
        end_ids: frozenset[int],
        given_layers: tuple[int, ...] = (),
        products: LayerProducts | None = None,
        rows: NDArray[np.floating] | None = None,
    ) -> None:
        if rows is None:  # those of products in 8 bits are only looked up
            rows = heads.vocabulary if products is None else heads.vocabulary.astype(np.float16)
        super().__init__(heads, vocabulary_size, end_ids, given_layers, rows)
        self._products, self._owns_products = products or NumpyProducts(heads), True
        self._sizes = sizes = heads.manifest
        half = np.arange(0, sizes.head_dim, 2, dtype=np.float32) / np.float32(sizes.head_dim)
        self._frequencies = heads.arrays.get("frequencies", np.float32(sizes.rope_theta) ** -half)
        self._begin_cache()

    def _begin_cache(self) -> None:
        self._keys = np.zeros((self._sizes.kv_heads, 0, self._sizes.head_dim), np.float32)
        self._values = self._keys.copy()
        self._length = 0  # pairs in the cache
        self._end = 0  # text position of the first pair that is not in it

    def another(self, sequence: int) -> Self:
        found = super().another(sequence)
        found._owns_products = False
        found._begin_cache()
        return found

    def begin(self, prompt_ids: TokenIds) -> None:
        super().begin(prompt_ids)
        self._length = self._end = 0

    def projected(self, features: Array) -> Array:
        return self._products.fuse(features)

    def num_uncached(self, token_ids: TokenIds) -> int:
        return min(token_ids.size - 1 - self._end, WINDOW)

    def drafted(self, request: DraftRequest, features: Array) -> Draft:
        try:
            self._make_room(len(features) + request.max_tokens)
            state, scores = self._catch_up(request.token_ids, features)
        except BaseException:
            self._length = self._end = 0  # its progress is unknown
            raise
        committed = self._length
        try:
            make = self._tree if self.grows(request) else self._chain
            return make(request, state, scores)
        finally:
            self._length = committed  # drops the pairs that it predicted itself

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
        committed, states, places = self._length, {ROOT: state}, dict[int, int]()

        def scores_of(growth: Growth) -> Array:
            waiting, first = growth.waiting, self._length
            nodes = [growth.nodes[node] for node in waiting]
            places.update(zip(waiting, range(first, first + len(nodes)), strict=True))
            sees = np.zeros((len(nodes), first + len(nodes)), np.bool_)
            sees[:, :committed] = True
            for row, node in enumerate(waiting):
                sees[row, [places[each] for each in growth.path(node)]] = True
            positions = self._end + np.array([node.depth for node in nodes])
            embedded = self.embed(np.array([node.candidate.token_id for node in nodes], np.int32))
            x, queries = self._read(np.stack([states[node.parent] for node in nodes]), embedded, positions)
            found, scores_found = self._behind(x, queries, sees)
            states.update(zip(waiting, found, strict=True))
            return scores_found

        return self.tree(request, candidates_for(request, request.sampler, like_chains=True), scores, scores_of)

    def _catch_up(self, token_ids: TokenIds, states: Array) -> tuple[Array, Array]:
        """Read the pairs that were committed since the last draft; returns the prediction from the last of them."""
        last = token_ids.size - 2  # position of the state that the pending token was sampled from
        first = last + 1 - len(states)
        if not first <= self._end <= last:  # states are missing in between, or the text is asked for again
            self._length, self._end = 0, first
        new = last + 1 - self._end
        found = self._predicted(self.read(states[-new:]), self.embed(token_ids[-new:]), self._end)
        self._end = last + 1
        return found

    def _predicted(self, states: Array, embedded: Array, position: int) -> tuple[Array, Array]:
        """Append the pairs (states [n, hidden], embedded [n, hidden]); the state [hidden] that follows the last one,
        and its scores [m]. `position` of the first pair in the text.
        """
        x, queries = self._read(states, embedded, np.arange(position, position + len(states)))
        found, scores = self._behind(x[-1:], queries[-1:])
        return found[0], scores[0]

    def _read(self, states: Array, embedded: Array, positions: NDArray[np.intp]) -> tuple[Array, Array]:
        """Append pairs at text `positions` [n]; what their layer starts with [n, hidden], and their queries."""
        sizes = self._sizes
        x, found = self._products.before(states, embedded)
        found = found.reshape(len(x), -1, sizes.head_dim)  # queries, keys, values
        rotated = _rotated(found[:, : -sizes.kv_heads], *self._angles(positions))
        place = slice(self._length, self._length + len(x))
        self._keys[:, place] = rotated[:, sizes.heads :].swapaxes(0, 1)
        self._values[:, place] = found[:, -sizes.kv_heads :].swapaxes(0, 1)
        self._length += len(x)
        return x, rotated[:, : sizes.heads]

    def _behind(self, x: Array, queries: Array, sees: NDArray[np.bool_] | None = None) -> tuple[Array, Array]:
        """(states [n, hidden], scores [n, m]) of what follows pairs once read; `sees` [n, pairs]: those each looks at,
        None: all."""
        states, scores = self._products.after(x, self._attended(queries, sees))
        return states, self._scored.complete(states, scores)

    def _attended(self, queries: Array, sees: NDArray[np.bool_] | None) -> Array:
        """Attention of `queries` [n, heads, size] over the pairs that each `sees`: [n, heads * size]."""
        sizes, length, count = self._sizes, self._length, len(queries)
        grouped = queries.reshape(count, sizes.kv_heads, -1, sizes.head_dim).swapaxes(0, 1)
        rows = grouped.reshape(sizes.kv_heads, -1, sizes.head_dim)  # of one pair the heads of a group follow each other
        scores = rows @ self._keys[:, :length].swapaxes(1, 2) / np.float32(math.sqrt(sizes.head_dim))
        if sees is not None:
            scores = np.where(sees.repeat(rows.shape[1] // count, axis=0), scores, _UNSEEN)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        found: Array = (weights @ self._values[:, :length]).reshape(grouped.shape).swapaxes(0, 1).reshape(count, -1)
        return found

    def _make_room(self, count: int) -> None:
        """See that so many pairs fit; the oldest ones go."""
        if self._length + count <= self._keys.shape[1]:
            return
        kept = min(self._length, WINDOW)
        keys, values = (old[:, self._length - kept : self._length] for old in (self._keys, self._values))
        shape = (self._sizes.kv_heads, 2 * WINDOW + count, self._sizes.head_dim)
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._keys[:, :kept], self._values[:, :kept] = keys, values
        self._length = kept

    def _angles(self, positions: NDArray[np.intp]) -> tuple[Array, Array]:
        """Cosines and sines [n, 1, head size / 2] of text positions [n]."""
        angles = positions.astype(np.float32)[:, None, None] * self._frequencies
        return np.cos(angles), np.sin(angles)

    @property
    def bytes_used(self) -> int:
        return super().bytes_used + self._products.num_bytes + self._keys.nbytes + self._values.nbytes

    def close(self) -> None:
        if self._owns_products:
            self._products.close()


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions in Hugging Face's half-split order: x [..., heads, size]; cos, sin [..., 1, size / 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    found = np.empty_like(x)
    np.subtract(first * cos, second * sin, out=found[..., :half])
    np.add(second * cos, first * sin, out=found[..., half:])
    return found

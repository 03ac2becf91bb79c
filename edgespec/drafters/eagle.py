"""EAGLE (arXiv 2401.15077): one layer continues from the target's last hidden state, token by token.

Each step reads a state and the token behind it, and predicts the next state, from which the reduced head scores the
next token. For committed text it reads the target's own states, for its draft those that it predicted itself; only
pairs of the former stay in the cache of keys and values. `scripts/train/heads.py` makes the head.

Reading a long prompt at once would take as long as one of the target's passes or several. So the first draft reads its
end, and each one behind it a part before that: with one layer a pair's keys and values do not depend on others.

Its trees are dynamic (EAGLE-2, arXiv 2406.16858): nodes are read several at a time, each attending to the text and its
own path, and grow best first, which selects the rows that EAGLE-2's ranking selects from a full tree.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.growth import ROOT, Growth, candidates_for, takes_tree
from edgespec.drafters.head_layer import numpy_layer
from edgespec.drafters.states import Array, StateDrafter
from edgespec.engines.head import HeadLayer, NewPairs, Pairs, frequencies_of, rotary_tables
from edgespec.formats.head_file import HeadFile
from edgespec.types import Draft, TokenIds

WINDOW = 512  # pairs that it looks back at
AT_ONCE = 64  # pairs that a draft reads of a text whose end it has not read, and then of what is before them
MOST_NEW = 2 * AT_ONCE  # with more at the end that it has not read, it begins anew there


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
        self._sizes, self._frequencies = heads.manifest, frequencies_of(heads)
        self._begin_cache()

    def _begin_cache(self) -> None:
        self._pairs = Pairs.room(self._sizes, 0)
        self._places = np.zeros(0, np.int64)  # in the text, of the pairs in the cache
        self._known = 0  # of the first pair whose state was known at the last draft
        self._forget(0, 0)

    def another(self, sequence: int) -> Self:
        found = super().another(sequence)
        found._owns_layer = False
        found._begin_cache()
        return found

    def begin(self, prompt_ids: TokenIds) -> None:
        super().begin(prompt_ids)
        self._forget(0, 0)

    def _forget(self, place: int, origin: int) -> None:
        """Begin the cache anew with the pair at `place` in the text; positions count from `origin`."""
        self._pairs.length = 0
        self._first = self._end = place  # those between are in the cache
        self._origin = origin

    def projected(self, features: Array) -> Array:
        return self._layer.fuse(features)

    def num_uncached(self, token_ids: TokenIds) -> int:
        new = token_ids.size - 1 - self._end
        return new + len(self._earlier(token_ids.size - 1)) if new <= MOST_NEW else AT_ONCE

    def _earlier(self, end: int) -> range:
        """The pairs before those in the cache that the next draft reads, of a text with pairs up to `end`."""
        return range(max(self._first - AT_ONCE, self._known, end - WINDOW), self._first)

    def drafted(self, request: DraftRequest, features: Array) -> Draft:
        try:
            state, scores = self._catch_up(request.token_ids, features, request.max_tokens)
        except BaseException:
            self._forget(0, 0)  # its progress is unknown
            raise
        committed = self._pairs.length
        try:
            make = self._tree if takes_tree(request) else self._chain
            return make(request, state, scores)
        finally:
            self._pairs.length = committed  # drops the pairs that it predicted itself

    def _chain(self, request: DraftRequest, state: Array, scores: Array) -> Draft:
        """A chain behind the text; `state` [hidden], `scores` [m]: those predicted at its end."""
        place = self._end

        def scores_after(token_id: int | None) -> Array:
            nonlocal state, scores, place
            if token_id is not None:
                embedded = self.embed(np.array([token_id], np.int32))
                state, scores = self._predicted(state[None], embedded, np.array([place]))
                place += 1
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
            embedded = self.embed(np.array([node.token_id for node in nodes], np.int32))
            above = np.stack([states[node.parent] for node in nodes])
            new = NewPairs(above, embedded, self._end + depths, sees, len(nodes))
            found, scores_found = self._read(new)
            states.update(zip(waiting, found, strict=True))
            return scores_found

        return self.tree(request, candidates_for(request, request.sampler), scores, scores_of)

    def _catch_up(self, token_ids: TokenIds, features: Array, room: int) -> tuple[Array, Array]:
        """Read the pairs that were committed since the last draft, and some earlier ones; see that `room` more fit.

        Gives what follows the last pair: a state [hidden] and its scores [m].
        """
        end = token_ids.size - 1  # the last pair has the pending token
        self._known = known = end - len(features)
        earlier = self._earlier(end)
        if not known <= self._end < end or end - self._end > MOST_NEW:  # states are missing, or the text is another
            self._forget(max(end - AT_ONCE, known), max(end - WINDOW, 0))
            earlier = range(0)
        places = np.array([*earlier, *range(self._end, end)])
        self._make_room(len(places) + room)
        self._places[self._pairs.length : self._pairs.length + len(places)] = places
        found = self._predicted(self.read(features[places - known]), self.embed(token_ids[places + 1]), places)
        self._first, self._end = self._first - len(earlier), end
        return found

    def _predicted(self, states: Array, embedded: Array, places: NDArray[np.int64]) -> tuple[Array, Array]:
        """Append the pairs (states [n, hidden], embedded [n, hidden]) at `places` [n] in the text; the state [hidden]
        that follows the last one, and its scores [m].
        """
        found, scores = self._read(NewPairs(states, embedded, places))
        return found[0], scores[0]

    def _read(self, new: NewPairs) -> tuple[Array, Array]:
        """As HeadLayer.read, with positions in the text, and with the scores of all tokens that are scored."""
        found, scores = self._layer.read(self._pairs, new._replace(positions=new.positions - self._origin))
        return found, self._scored.complete(found, scores)

    def _make_room(self, count: int) -> None:
        """See that so many pairs fit; where they do not, those go that are out of sight."""
        old = self._pairs
        if old.length + count <= len(self._places):
            return
        origin = max(self._end - WINDOW, 0)
        kept = np.flatnonzero(self._places[: old.length] >= origin)
        self._pairs = Pairs.room(self._sizes, 2 * WINDOW + count)
        places = np.zeros(2 * WINDOW + count, np.int64)
        places[: len(kept)] = self._places[kept]
        # Positions begin anew, so that the tables of the rotary embedding do not grow with the text.
        self._pairs.take(old, kept, rotary_tables(self._frequencies, np.array([origin - self._origin])))
        self._places, self._origin, self._first = places, origin, max(self._first, origin)

    @property
    def bytes_used(self) -> int:
        return super().bytes_used + self._layer.num_bytes + self._pairs.num_bytes

    def close(self) -> None:
        if self._owns_layer:
            self._layer.close()


class LayersEagleDrafter(EagleDrafter):
    """EAGLE-3 (arXiv 2503.01840): `heads` of generation 3 read the inputs of several layers, fused into one.

    The head has an embedding of its own, and its layer goes on with the state before the last norm. `edgespec export
    TARGET --draft HEAD --to onnx` makes its file. Without a `layer` numpy computes it in float32.
    """

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

"""One sequence of an engine together with the token ids it holds: the only owner of that knowledge."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine
from edgespec.types import Batch, Draft, Logits, TokenIds


class CachedSequence:
    """The KV cache of one sequence as a list of tokens that grows, is rolled back and is reused."""

    most_per_token = 1  # places of the cache that a token takes at most

    def __init__(self, engine: Engine, sequence: int = 0) -> None:
        self.engine = engine
        self.sequence = sequence
        # one slot more than the cache: the pending token stands behind the cached ones
        self._ids = np.zeros(engine.facts.context_length + 1, np.int32)
        self._length = engine.length(sequence)
        if self._length:
            self.rollback(0)

    @property
    def length(self) -> int:
        return self._length

    @property
    def token_ids(self) -> TokenIds:
        """The cached tokens [length], a view."""
        return self._ids[: self._length]

    def with_pending(self, token_id: int) -> TokenIds:
        """The cached tokens and `token_id` behind them [length + 1], a view that the next call may change."""
        self._ids[self._length] = token_id
        return self._ids[: self._length + 1]

    @property
    def room(self) -> int:
        """How many more tokens fit."""
        return self.engine.facts.context_length - self._length

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a text, as this sequence counts them."""
        return self.engine.vocabulary.end_ids

    def latest_fitting(self, token_ids: TokenIds, capacity: int) -> int:
        """How many of `token_ids` [n], from the last one back, take at most `capacity` places of the cache."""
        return max(min(token_ids.size, capacity), 0)

    def reuse(self, wanted_ids: TokenIds) -> int:
        """Roll back to the longest prefix of `wanted_ids` [n] that is cached and leaves a token to feed; its length.

        A model that cannot roll back keeps its cache only when `wanted_ids` goes on from all of it.
        """
        shared = self.shared_length(wanted_ids)
        if shared < self._length:
            self.rollback(shared if self.engine.facts.can_rollback else 0)
        return self._length

    def shared_length(self, wanted_ids: TokenIds) -> int:
        """How many of `wanted_ids` [n], the last one excepted, the cache holds from the first on."""
        limit = min(self._length, wanted_ids.size - 1)
        differs = np.flatnonzero(self._ids[:limit] != wanted_ids[:limit])
        return int(differs[0]) if differs.size else limit

    def feed(self, token_ids: TokenIds) -> Logits:
        """Append tokens [n] in as few passes as exactness allows; the logits row [vocabulary] after the last one.

        In reproducible mode no pass leaves the pinned width class, so a prompt read whole, one read in parts and
        tokens that were once decoded leave the same bits in the cache.
        """
        step = self.engine.widest_pass
        for start in range(0, token_ids.size, step):
            part = token_ids[start : start + step]
            logits = self.engine.forward(Batch.chain(part, sequence=self.sequence, last_only=True))
            self._append(part)
        last: Logits = logits[-1]
        return last

    def passes_for(self, num_tokens: int) -> int:
        """How many passes `feed` makes of so many tokens."""
        return -(-num_tokens // self.engine.widest_pass)

    def score(self, pending_token_id: int, draft: Draft) -> Logits:
        """Logits [1 + draft tokens, vocabulary] of the pending token and every draft node; `keep` must follow."""
        if draft.num_tokens:
            return self.engine.forward(Batch.tree(pending_token_id, draft, sequence=self.sequence))
        return self.engine.forward(Batch.chain([pending_token_id], sequence=self.sequence))

    def look(self, token_ids: TokenIds, parents: TokenIds, outputs: NDArray[np.bool_]) -> Logits:
        """Logits of a tree of tokens [n] behind the cached ones, for the rows of `outputs`; nothing of it stays.

        `parents` [n]: rows, or -1 behind the last cached token. Raises as `Engine.forward`.
        """
        sequences = np.full(token_ids.size, self.sequence, np.int32)
        logits = self.engine.forward(Batch(token_ids, parents, sequences, outputs))
        self.engine.rollback(self._length, self.sequence)
        return logits

    def keep(self, pending_token_id: int, draft: Draft, accepted_nodes: tuple[int, ...]) -> None:
        """Commit the pending token and the accepted path of the draft just scored, drop the rest."""
        if not draft.num_tokens:
            self._ids[self._length] = pending_token_id
            self._length += 1
            return
        if draft.is_chain:
            kept = self._length + 1 + len(accepted_nodes)
            if len(accepted_nodes) < draft.num_tokens:
                self.engine.rollback(kept, self.sequence)
        else:
            self.engine.keep_path((0, *(node + 1 for node in accepted_nodes)), self.sequence)
        self._append(np.array([pending_token_id, *draft.token_ids[list(accepted_nodes)]], np.int32))

    def rollback(self, to_length: int) -> None:
        self.engine.rollback(to_length, self.sequence)
        self._length = to_length

    def restore(self) -> None:
        """After an interruption: drop whatever a half-finished call left behind the known tokens."""
        # also where the length is right: a tree that was scored and not settled does not show in it
        self.engine.rollback(self._length, self.sequence)

    def _append(self, token_ids: TokenIds) -> None:
        self._ids[self._length : self._length + token_ids.size] = token_ids
        self._length += token_ids.size

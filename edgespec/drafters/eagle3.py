"""EAGLE-3 (arXiv 2503.01840): a head of one layer drafts a chain from hidden states of several of the target's layers.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, 2.2) is the same with the target's last hidden state alone, and a
layer that was trained as part of the target.

The head reads pairs of a state and the token behind it. For the text the states come from the target's passes; within
a draft the head's own last state replaces what the target has not computed yet. The next draft removes those pairs,
since the target's states are known by then.
"""

from __future__ import annotations

import numpy as np

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.chain import CHAIN_PRIOR, DrawnChain
from edgespec.engines.head import FeatureHead, States
from edgespec.types import EMPTY_DRAFT, Draft, Logits, TokenIds

BYTES_PER_FEATURE = 4 * 4  # two windows of features, and the copies of the library and of a pass


class Eagle3Drafter(Drafter):
    """Drafts with `head`, which it owns and closes. A request has features of at most `max_features` tokens.

    When the head's window is full, the older half of the pairs is dropped. The head skips text whose states are no
    longer available (the beginning of a long prompt, a part that was read for another drafter).
    """

    name = "eagle3"
    prior = CHAIN_PRIOR

    def __init__(self, head: FeatureHead, max_features: int) -> None:
        self._head = head
        self._max_features = max_features
        self._known = np.empty(0, np.int32)  # the text whose pairs are cached, its last token in the last of them
        self.wants_layers = head.facts.layers

    def begin(self, prompt_ids: TokenIds) -> None:
        # Pairs that the prompt shares with the last text are kept; the others are read with the first draft.
        pass

    def draft(self, request: DraftRequest) -> Draft:
        """A chain sampled with the target's settings and, unless the rule needs distributions, the target's noise."""
        most = min(request.max_tokens, self._head.facts.context_length // 4)
        features = self._features(request)
        if most < 1 or features is None or not len(features):
            return EMPTY_DRAFT
        try:
            logits, state = self._catch_up(request.token_ids, features, most)
            return self._chain(request, logits, state, most)
        except BaseException:
            self._known = self._known[:0]  # its progress is unknown: the next draft reads its pairs again
            raise

    def _features(self, request: DraftRequest) -> States | None:
        """The target's, of the last tokens before the pending one [n, feature width]."""
        return request.layer_inputs

    def _catch_up(self, token_ids: TokenIds, features: States, most: int) -> tuple[Logits, States]:
        """Read the pairs of `token_ids` [n] that the cache lacks; the logits and the state after the last of them."""
        head, end = self._head, token_ids.size - 1  # pairs there are
        first_known = end - len(features)
        kept = min(self._shared_pairs(token_ids), head.end, end - 1)
        goes_on = kept > head.start and kept >= first_known
        start = self._window_start(head.start if goes_on else first_known, end, most)
        if goes_on and start < kept:
            head.rollback(kept)
            head.drop_before(start)
        else:
            kept = start
            head.restart(kept)
        found = head.decode(token_ids[kept + 1 :], head.encode(features[kept - first_known :]))
        self._known = token_ids.copy()
        return found

    def _shared_pairs(self, token_ids: TokenIds) -> int:
        """Up to which pair the cache holds the text's own."""
        limit = min(self._known.size, token_ids.size)
        differs = np.flatnonzero(self._known[:limit] != token_ids[:limit])
        return int(differs[0] if differs.size else limit) - 1

    def _window_start(self, first: int, end: int, most: int) -> int:
        """`first`, or a later pair when those from it up to `end` and `most` more do not fit."""
        room = self._head.facts.context_length
        return first if end + most - first <= room else end - room // 2

    def _chain(self, request: DraftRequest, logits: Logits, state: States, most: int) -> Draft:
        chain = DrawnChain(request, most, self._head.facts.end_ids)
        chain.add(logits)
        while chain.is_open:
            logits, state = self._head.decode(np.array(chain.token_ids[-1:], np.int32), state[np.newaxis].copy())
            chain.add(logits)
        return chain.as_draft()

    def num_uncached(self, token_ids: TokenIds) -> int:
        return min(token_ids.size - max(self._shared_pairs(token_ids), 0), self._max_features)

    @property
    def bytes_used(self) -> int:
        return self._head.facts.num_bytes + self._max_features * self._head.facts.feature_width * BYTES_PER_FEATURE

    def another(self, sequence: int) -> Drafter | None:
        head = self._head.another()
        return None if head is None else type(self)(head, self._max_features)

    def set_threads(self, threads: int) -> None:
        self._head.set_threads(threads)

    def cancel(self) -> None:
        self._head.cancel()

    def clear_cancel(self) -> None:
        self._head.clear_cancel()

    def close(self) -> None:
        self._head.close()


class MtpDrafter(Eagle3Drafter):
    """Drafts with the multi-token prediction layer of the target's own file."""

    name = "mtp"
    wants_features = True

    def _features(self, request: DraftRequest) -> States | None:
        return request.features

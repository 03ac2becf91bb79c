"""EAGLE-3 (arXiv 2503.01840): a head of one layer drafts a chain from hidden states of several of the target's layers.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, 2.2) is the same with the target's last hidden state alone, and a
layer that was trained as part of the target.

The head reads pairs of a state and the token behind it. For the text the states come from the target's passes; within
a draft the head's own last state replaces what the target has not computed yet. The next draft removes those pairs,
since the target's states are known by then.
"""

from __future__ import annotations

import numpy as np

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.growth import DrawnChain
from edgespec.drafters.head_window import HeadDrafter
from edgespec.engines.head import FeatureHead, States
from edgespec.types import Draft, Logits, TokenIds


class Eagle3Drafter(HeadDrafter[FeatureHead]):
    """Drafts token by token. An entry of the head's cache is a pair, so that the last token is in the last of them."""

    name = "eagle3"

    def _most(self, request: DraftRequest) -> int:
        return min(request.max_tokens, self._head.facts.context_length // 4)

    def _drafted(self, request: DraftRequest, features: States, most: int) -> Draft:
        logits, state = self._catch_up(request.token_ids, features, most)
        chain = DrawnChain(request, most, self._head.facts.end_ids)
        chain.add(logits)
        while chain.is_open:
            logits, state = self._head.decode(np.array(chain.token_ids[-1:], np.int32), state[np.newaxis].copy())
            chain.add(logits)
        return chain.as_draft()

    def _catch_up(self, token_ids: TokenIds, features: States, most: int) -> tuple[Logits, States]:
        """Read the pairs of `token_ids` [n] that the cache lacks; the logits and the state after the last of them."""
        head, end = self._head, token_ids.size - 1  # pairs there are
        first_known = end - len(features)
        kept = self._keep(min(self._shared_tokens(token_ids), end) - 1, first_known, end, most)
        found = head.decode(token_ids[kept + 1 :], head.encode(features[kept - first_known :]))
        self._known = token_ids.copy()
        return found

    def num_uncached(self, token_ids: TokenIds) -> int:
        return min(token_ids.size - max(self._shared_tokens(token_ids) - 1, 0), self._max_features)


class MtpDrafter(Eagle3Drafter):
    """Drafts with the multi-token prediction layer of the target's own file."""

    name = "mtp"
    wants_features = True

    def _features(self, request: DraftRequest) -> States | None:
        return request.features

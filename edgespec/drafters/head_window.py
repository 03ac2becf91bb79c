"""What drafters with a head of their own have in common: how much of the text the head's cache holds and keeps."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import numpy as np

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.growth import CHAIN_PRIOR
from edgespec.engines.head import BYTES_PER_FEATURE, CachedHead, States
from edgespec.types import EMPTY_DRAFT, Draft, TokenIds

Head = TypeVar("Head", bound=CachedHead)


class WithHead(Drafter, Generic[Head]):
    """Drafts with `head`, which it closes unless another drafter owns it; the target's features are kept for it.

    A request has features of at most `max_features` tokens.
    """

    def __init__(self, head: Head, max_features: int, *, owns_head: bool = True) -> None:
        self._head, self._max_features, self._owns_head = head, max_features, owns_head

    @property
    def bytes_used(self) -> int:
        facts = self._head.facts
        own = facts.num_bytes if self._owns_head else 0
        return own + self._max_features * facts.feature_width * BYTES_PER_FEATURE

    def set_threads(self, threads: int) -> None:
        self._head.set_threads(threads)

    def cancel(self) -> None:
        self._head.cancel()

    def clear_cancel(self) -> None:
        self._head.clear_cancel()

    def close(self) -> None:
        if self._owns_head:
            self._head.close()


class HeadDrafter(WithHead[Head]):
    """Drafts with `head`, which it owns and closes. A request has features of at most `max_features` tokens.

    When the head's window is full, the older half of the entries is dropped. The head skips text whose features are no
    longer available (the beginning of a long prompt, a part that was read for another drafter).
    """

    prior = CHAIN_PRIOR

    def __init__(self, head: Head, max_features: int) -> None:
        super().__init__(head, max_features)
        self._known = np.empty(0, np.int32)  # the text whose entries are cached
        self.wants_layers = head.facts.layers

    def begin(self, prompt_ids: TokenIds) -> None:
        # Entries that the prompt shares with the last text are kept; the others are read with the first draft.
        pass

    def draft(self, request: DraftRequest) -> Draft:
        """A chain sampled with the target's settings and, unless the rule needs distributions, the target's noise."""
        features = self._features(request)
        most = self._most(request)
        if most < 1 or features is None or not len(features):
            return EMPTY_DRAFT
        try:
            return self._drafted(request, features, most)
        except BaseException:
            self._known = self._known[:0]  # its progress is unknown: the next draft reads its entries again
            raise

    @abstractmethod
    def _most(self, request: DraftRequest) -> int:
        """Tokens to draft at most."""

    @abstractmethod
    def _drafted(self, request: DraftRequest, features: States, most: int) -> Draft:
        """At most `most` tokens behind the text, whose last `features` [n, feature width] are known."""

    def _features(self, request: DraftRequest) -> States | None:
        """The target's, of the last tokens before the pending one [n, feature width]."""
        return request.layer_inputs

    def _keep(self, shared: int, first_known: int, end: int, room: int) -> int:
        """Drop what is not the text's or does not fit; up to where the cache then holds the entries before `end`.

        `shared`: up to where it holds the text's own; features are known from `first_known` on; `room`: entries that
        must remain free behind `end`.
        """
        head = self._head
        kept = min(shared, head.end)
        goes_on = kept > head.start and kept >= first_known
        start = head.start if goes_on else first_known
        length = head.facts.context_length
        if end + room - start > length:
            start = end - length // 2
        if goes_on and start < kept:
            head.rollback(kept)
            head.drop_before(start)
            return kept
        head.restart(start)
        return start

    def _shared_tokens(self, token_ids: TokenIds) -> int:
        """How many first tokens the text shares with the one in the cache."""
        limit = min(self._known.size, token_ids.size)
        differs = np.flatnonzero(self._known[:limit] != token_ids[:limit])
        return int(differs[0] if differs.size else limit)

    def another(self, sequence: int) -> Drafter | None:
        head = self._head.another()
        return None if head is None else type(self)(head, self._max_features)

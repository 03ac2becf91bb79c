"""The target's first layers and head as its draft model; the target's pass goes on behind the states they computed."""

from __future__ import annotations

import numpy as np

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.growth import DrawnChain
from edgespec.drafters.model import ChainDrafter
from edgespec.engines.base import Engine
from edgespec.engines.sequence import Passes
from edgespec.types import EMPTY_DRAFT, Draft, TokenIds


class EarlyExitDrafter(ChainDrafter):
    """Drafts with the early exit of the engine `target`, which it does not own: same cache, shared states.

    It follows the target's first sequence, which has read the text already: nothing to catch up with, and no window.
    """

    name = "early-exit"

    def __init__(self, target: Engine) -> None:
        super().__init__(target)
        self._exit = target.early_exit()

    def begin(self, prompt_ids: TokenIds) -> None:
        """The target reads the prompt for both."""

    def drafting(self, request: DraftRequest) -> Passes[Draft]:
        """Empty if the target's cache holds no prefix of the text."""
        yield from ()  # its rows are the target's own and share no pass
        text = request.token_ids
        most = min(request.max_tokens, self._engine.facts.context_length - text.size)
        read = self._exit.follow(text)
        if read is None or most < 1:
            return EMPTY_DRAFT
        chain, unread = DrawnChain(request, most, self._engine.vocabulary.end_ids), text[read:]
        while chain.is_open:
            chain.add(self._exit.feed(unread))
            unread = np.array(chain.token_ids[-1:], np.int32)
        return chain.as_draft()

    def num_uncached(self, token_ids: TokenIds) -> int:
        return 1

    @property
    def bytes_used(self) -> int:
        return self._exit.bytes_used

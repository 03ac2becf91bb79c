"""Gemma 4's drafter: a chain from the target's last hidden state and the target's own keys and values.

Multi-token prediction as `MtpDrafter` does it, with another kind of layer: it reads nothing of the text itself, so a
draft costs its passes alone however the text has changed.
"""

from __future__ import annotations

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.chain import CHAIN_PRIOR, DrawnChain
from edgespec.engines.head import BYTES_PER_FEATURE, StepHead
from edgespec.types import EMPTY_DRAFT, Draft, TokenIds


class Gemma4ChainDrafter(Drafter):
    """Drafts with `head` for one `sequence` of the target; `max_features` of the target's states are kept for it.

    It owns and closes the head, unless `owns_head` is False.
    """

    name = "mtp"
    prior = CHAIN_PRIOR
    wants_features = True

    def __init__(self, head: StepHead, max_features: int, *, sequence: int = 0, owns_head: bool = True) -> None:
        self._head, self._max_features, self._sequence, self._owns_head = head, max_features, sequence, owns_head

    def begin(self, prompt_ids: TokenIds) -> None:
        pass

    def draft(self, request: DraftRequest) -> Draft:
        """A chain sampled with the target's settings and, unless the rule needs distributions, the target's noise."""
        if request.max_tokens < 1 or request.features is None or not len(request.features):
            return EMPTY_DRAFT
        position, token_id, state = request.token_ids.size - 1, int(request.token_ids[-1]), request.features[-1]
        chain = DrawnChain(request, request.max_tokens, self._head.facts.end_ids)
        while chain.is_open:
            logits, state = self._head.step(token_id, state, position, self._sequence)
            chain.add(logits)
            token_id = chain.token_ids[-1]
        return chain.as_draft()

    @property
    def bytes_used(self) -> int:
        return self._head.facts.num_bytes + self._max_features * self._head.facts.feature_width * BYTES_PER_FEATURE

    def another(self, sequence: int) -> Drafter:
        return type(self)(self._head, self._max_features, sequence=sequence, owns_head=False)

    def set_threads(self, threads: int) -> None:
        self._head.set_threads(threads)

    def cancel(self) -> None:
        self._head.cancel()

    def clear_cancel(self) -> None:
        self._head.clear_cancel()

    def close(self) -> None:
        if self._owns_head:
            self._head.close()

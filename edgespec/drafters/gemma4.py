"""Gemma 4's drafter: a chain from the target's last hidden state and the target's own keys and values.

Multi-token prediction as `MtpDrafter` does it, with another kind of layer: it reads nothing of the text itself, so a
draft costs its passes alone however the text has changed.
"""

from __future__ import annotations

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.growth import CHAIN_PRIOR, DrawnChain
from edgespec.drafters.head_window import WithHead
from edgespec.engines.head import StepHead
from edgespec.types import EMPTY_DRAFT, Draft, TokenIds


class Gemma4ChainDrafter(WithHead[StepHead]):
    """Drafts token by token for one `sequence` of the target; all sequences share the head."""

    name = "mtp"
    prior = CHAIN_PRIOR
    wants_features = True

    def __init__(self, head: StepHead, max_features: int, *, sequence: int = 0, owns_head: bool = True) -> None:
        super().__init__(head, max_features, owns_head=owns_head)
        self._sequence = sequence

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
            token_id = chain.token_ids[-1] if chain.token_ids else token_id
        return chain.as_draft()

    def another(self, sequence: int) -> Drafter:
        return type(self)(self._head, self._max_features, sequence=sequence, owns_head=False)

"""What a grammar forces next, spelled as the model's tokenizer splits it: the punctuation and the keys of JSON.

Only the bytes are forced, and the model chooses how to spell them. So these tokens are a draft, to be verified like any
other: text and distribution stay those of decoding without it. It is made for every controller and drafts nothing
where an answer is free.
"""

from __future__ import annotations

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import EMPTY_DRAFT, Draft, TokenIds

FORCED = "forced"
_USUAL = 0.95  # share of its tokens that is accepted


class ForcedDrafter(Drafter):
    """Drafts `Sampler.forced`. It has no state."""

    name = FORCED
    is_free = True
    prior = (3.0,)  # models nearly always spell what they must write as they learnt to

    def begin(self, prompt_ids: TokenIds) -> None:
        pass

    def serves(self, request: DraftRequest) -> bool:
        return request.sampler.constraint is not None

    def draft(self, request: DraftRequest) -> Draft:
        """A chain; empty where nothing is forced."""
        forced = request.sampler.forced(request.token_ids)[: request.max_tokens]
        if not forced:
            return EMPTY_DRAFT
        return Draft.chain(forced, [_USUAL] * len(forced), evidence=[()] * len(forced))

"""A draft model with a draft model of its own: the small one drafts for the medium, and the medium for the target.

The draft is the medium's own text, as if the medium had drafted alone: under the coupled rule its picks with the
target's noise, under a rule that compares distributions its samples with the draft noise, each with the medium's
distribution. The small model only changes how many passes of the medium that takes (staged speculation, arXiv
2308.04623, with the coupled rule between the stages).
"""

from __future__ import annotations

import numpy as np

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.growth import DrawnChain
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence, Passes, restored_on_failure
from edgespec.types import EMPTY_DRAFT, Draft, TokenIds

_AHEAD = 4  # tokens of the small model for each pass of the medium
_READ_ALONG = 4  # committed tokens that share the medium's first pass with small ones; more are read before it


class HierarchicalDrafter(ModelDrafter):
    """Drafts with the engine `medium`, which it owns and closes; `small` drafts for it and is borrowed.

    A full window of the medium slides as a draft model's does. `ahead`: tokens that `small` drafts for each pass of the
    medium.
    """

    name = "hierarchical"

    def __init__(
        self, small: ModelDrafter, medium: Engine, ahead: int = _AHEAD, cache: CachedSequence | None = None
    ) -> None:
        """`cache`: of the medium, for another sequence of one that owns the engine; None: its first one, owned."""
        super().__init__(medium, cache, owns_engine=cache is None)
        self._small, self._ahead = small, ahead
        self.models = (*small.models, medium)

    def _of_sequence(self, sequence: int) -> ModelDrafter | None:
        small = self._small.another(sequence)
        if small is None:
            return None
        cache = self.cache.another(sequence)
        return HierarchicalDrafter(small, self._engine, self._ahead, cache)

    def begin(self, prompt_ids: TokenIds) -> None:
        super().begin(prompt_ids)
        self._small.begin(prompt_ids)

    def drafting(self, request: DraftRequest) -> Passes[Draft]:
        """A chain of the medium's tokens, as ModelDrafter's."""
        most = min(request.max_tokens, self._engine.facts.context_length // 4)
        if most < 1:
            return EMPTY_DRAFT
        chain = DrawnChain(request.at_most(most), self._engine.vocabulary.end_ids)
        with restored_on_failure(self.cache):
            missing = yield from self._missing(request.token_ids, most)
            while chain.is_open:
                missing = yield from self._inner_round(chain, missing)
        return chain.as_draft()

    def _missing(self, token_ids: TokenIds, most: int) -> Passes[TokenIds]:
        """The last few tokens that the medium has not read; earlier ones that it lacks are read here."""
        window = self._window(token_ids, most)
        self.cache.reuse(window)
        missing = window[self.cache.length :]
        if missing.size > _READ_ALONG:
            yield from self.cache.feeding(missing[:-1])
            return missing[-1:]
        return missing

    def _inner_round(self, chain: DrawnChain, missing: TokenIds) -> Passes[TokenIds]:
        """The small model drafts, the medium reads `missing` and verifies in one pass; what it has not read then."""
        ahead = yield from self._small_draft(chain)
        fed = Draft.chain(np.concatenate((missing[1:], ahead.token_ids)))
        logits = (yield from self.cache.scoring(int(missing[0]), fed))[missing.size - 1 :]
        agreed = 0
        while (
            chain.add(logits[agreed]) and agreed < ahead.num_tokens and chain.token_ids[-1] == ahead.token_ids[agreed]
        ):
            agreed += 1
        self.cache.keep(int(missing[0]), fed, tuple(range(missing.size - 1 + agreed)))
        return np.array(chain.token_ids[-1:], np.int32)

    def _small_draft(self, chain: DrawnChain) -> Passes[Draft]:
        """Tokens of the small model behind those of the chain, drawn with the noise that the medium will use."""
        count = min(self._ahead, chain.request.max_tokens - len(chain.token_ids) - 1)
        if count < 1:
            return EMPTY_DRAFT
        behind = chain.request._replace(
            token_ids=chain.text, max_tokens=count, num_drafted=len(chain.token_ids), should_continue=None
        )
        return (yield from self._small.drafting(behind))

    def reading(self, token_ids: TokenIds, whole: int, part: int) -> int:
        self._small.reading(token_ids, whole, part)
        return super().reading(token_ids, whole, part)

    def reset_engine(self) -> Engine | None:
        self._small.reset_engine()
        return super().reset_engine()

"""The draft model: a small model on any engine drafts a chain token by token.

Its window is the text's first token (an attention sink, arXiv 2309.17453) and a latest part of the text, if not all of
it. When the text outgrows the model's context, the window slides by half a context at a time, so that the cost of a
slide is spread over many tokens and acceptance stays smooth. Behind a long prompt of which the controller cannot yet
afford the reading, it begins at a later token (`reading`).
"""

from __future__ import annotations

import numpy as np

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.growth import CHAIN_PRIOR, DrawnChain
from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence, Passes, at_once, restored_on_failure
from edgespec.types import EMPTY_DRAFT, Draft, Logits, TokenIds

_LEAST_READ = 32  # tokens; a window of fewer says little about what the draft is worth
_FREE = 32  # places of the context that a window leaves for drafts


class ModelDrafter(Drafter):
    """Drafts a chain with `engine`, for the target or for another drafter that looks ahead with it.

    `cache` translates another vocabulary into the target's. It closes the engine if it owns it.
    """

    name = "model"
    prior = CHAIN_PRIOR

    def __init__(
        self,
        engine: Engine,
        cache: CachedSequence | None = None,
        notes: tuple[str, ...] = (),
        *,
        owns_engine: bool = True,
    ) -> None:
        self._engine, self.notes = engine, notes
        self.models = (engine,)
        self.owned = self.models if owns_engine else ()
        self.cache = CachedSequence(engine) if cache is None else cache
        self._window_start = 1  # first text position in the window behind the text's first token
        self._former_start = 1  # the same in an earlier generation
        self._others: dict[int, ModelDrafter] = {}  # by sequence

    def begin(self, prompt_ids: TokenIds) -> None:
        # The prompt is fed with the first draft, off the path to the first token.
        if self._window_start > 1:  # drafters that share this one begin it as well
            self._former_start, self._window_start = self._window_start, 1

    def draft(self, request: DraftRequest) -> Draft:
        """A chain sampled with the target's settings and, unless the rule needs distributions, the target's noise."""
        return at_once(self.drafting(request))

    def drafting(self, request: DraftRequest) -> Passes[Draft]:
        room = self._engine.facts.context_length
        most = min(request.max_tokens, room // 4)
        if most < 1:
            return EMPTY_DRAFT
        with restored_on_failure(self.cache):
            chain = DrawnChain(request.at_most(most), self.cache.end_ids)
            chain.add((yield from self.catching_up(request.token_ids, most)))
            if chain.is_open:
                self.cache.mark()  # what was read up to here is the text; the next draft begins with it again
            while chain.is_open:
                chain.add((yield from self.cache.feeding(np.array(chain.token_ids[-1:], np.int32))))
            return chain.as_draft()

    def catching_up(self, token_ids: TokenIds, most: int) -> Passes[Logits]:
        """Feed what the cache lacks of `token_ids` [n]; the logits row after the last of them."""
        window = self._window(token_ids, most)
        self.cache.reuse(window)
        return (yield from self.cache.feeding(window[self.cache.length :]))

    def _window(self, token_ids: TokenIds, most: int) -> TokenIds:
        """The text as the draft sees it: all of it, or its first token and the latest part that fits.

        A window that has slid does not grow back when a shorter draft would let the whole text fit again.
        """
        capacity = self._engine.facts.context_length - most
        if token_ids.size <= self._window_start:
            self._window_start = 1
        if self._window_start == 1 and self.cache.latest_fitting(token_ids, capacity) == token_ids.size:
            return token_ids
        behind_first = self.cache.latest_fitting(token_ids, capacity - self.cache.most_per_token)
        if token_ids.size - self._window_start > behind_first:
            self._window_start = token_ids.size - self.cache.latest_fitting(token_ids, capacity // 2)
        return _from(token_ids, self._window_start)

    def num_uncached(self, token_ids: TokenIds) -> int:
        missing = self._missing_from(token_ids, self._window_start)
        if missing is None:
            return 1  # a slide is rare, and its cost is part of the measured time of a draft
        return missing

    def reading(self, token_ids: TokenIds, whole: int, part: int) -> int:
        """Chooses the window: the whole text, the one in use, the last generation's, or the latest `part` tokens.

        A window that has to slide since the context is full counts as the reading of half a context.
        """
        half = self._engine.facts.context_length // 2
        fits = False
        for start, most in ((1, whole), (self._window_start, part), (self._former_start, part)):
            missing = self._missing_from(token_ids, start)
            if missing is not None and missing <= most:
                self._window_start = start
                return missing
            fits = fits or missing is not None
        if not fits and whole >= half:
            part = half
        if part < min(_LEAST_READ, half):
            return self.num_uncached(token_ids) if fits else half
        self._window_start = token_ids.size - self.cache.latest_fitting(token_ids, min(part, half))
        return self.num_uncached(token_ids)

    @property
    def reads_part(self) -> bool:
        return self._window_start > 1 and self.cache.length > 1

    def _missing_from(self, token_ids: TokenIds, start: int) -> int | None:
        """Tokens that the cache lacks of the window from `start` on; None where that does not fit or is not there."""
        if start >= token_ids.size:
            return None
        window = _from(token_ids, start)
        room = self._engine.facts.context_length
        if self.cache.latest_fitting(window, room - min(_FREE, room // 4)) < window.size:
            return None
        return window.size - self.cache.reusable_length(window)

    @property
    def engine(self) -> Engine | None:
        return self._engine

    def reset_engine(self) -> Engine | None:
        self.cache.rollback(0)
        return self._engine

    @property
    def bytes_used(self) -> int:
        facts = self._engine.facts
        return facts.weight_bytes + facts.kv_bytes_per_token * facts.context_length

    def another(self, sequence: int) -> ModelDrafter | None:
        """The same one each time, since several drafters of a sequence may share its draft model."""
        if sequence >= self._engine.facts.max_sequences:
            return None
        if sequence not in self._others and (made := self._of_sequence(sequence)) is not None:
            self._others[sequence] = made
        return self._others.get(sequence)

    def _of_sequence(self, sequence: int) -> ModelDrafter | None:
        """A drafter like this one for another sequence of the engine, which it does not own."""
        return type(self)(self._engine, self.cache.another(sequence), owns_engine=False)


class EarlyExitDrafter(ModelDrafter):
    """Drafts with `engine`, the target's own first layers and head over the same weights."""

    name = "early-exit"

    @property
    def bytes_used(self) -> int:
        facts = self._engine.facts
        return facts.kv_bytes_per_token * facts.context_length


def _from(token_ids: TokenIds, start: int) -> TokenIds:
    """The first of `token_ids` [n] and those from `start` on."""
    return token_ids if start == 1 else np.concatenate((token_ids[:1], token_ids[start:]))

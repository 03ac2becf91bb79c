"""The draft model: a small model on any engine drafts a chain token by token.

Its context is its own: when the text outgrows it, the window keeps the first token (attention sinks there) and slides
in half-window jumps, so that the cost of a slide is spread over many tokens and acceptance has no cliff.
"""

from __future__ import annotations

import numpy as np

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.chain import CHAIN_PRIOR, DrawnChain
from edgespec.drafters.temperature import DraftTemperature, Factor
from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence, restored_on_failure
from edgespec.types import EMPTY_DRAFT, Draft, Logits, TokenIds


class ModelDrafter(Drafter):
    """Drafts with `engine`, which it owns and closes; `cache` shows another vocabulary as the target's.

    `temperature`: that of the draft over the target's, or "auto".
    """

    name = "model"
    prior = CHAIN_PRIOR

    def __init__(
        self,
        engine: Engine,
        cache: CachedSequence | None = None,
        notes: tuple[str, ...] = (),
        temperature: Factor = 1.0,
    ) -> None:
        self.notes = notes
        self.temperature = DraftTemperature(temperature)  # a drafter that shares the model shares it too
        self._engine = engine
        self._cache = CachedSequence(engine) if cache is None else cache
        self._window_start = 1  # first text position in the window behind the text's first token

    @property
    def cache(self) -> CachedSequence:
        """What the draft model holds, for a drafter that shares it."""
        return self._cache

    def begin(self, prompt_ids: TokenIds) -> None:
        # The prompt is fed with the first draft, off the path to the first token.
        self._window_start = 1

    def draft(self, request: DraftRequest) -> Draft:
        """A chain sampled with the target's settings and, unless the rule needs distributions, the target's noise."""
        return self._drafted(request, self.temperature)

    def look_ahead(self, request: DraftRequest) -> Draft:
        """As `draft`, at the very temperature of the request's sampler; its text may be drafted, so none is learnt."""
        return self._drafted(request, DraftTemperature())

    def _drafted(self, request: DraftRequest, temperature: DraftTemperature) -> Draft:
        room = self._engine.facts.context_length
        most = min(request.max_tokens, room // 4)
        if most < 1:
            return EMPTY_DRAFT
        temperature.learn(request.sampler, request.token_ids)
        with restored_on_failure(self._cache):
            logits = self.catch_up(request.token_ids, most)
            return self._chain(request, logits, most, temperature)

    def catch_up(self, token_ids: TokenIds, most: int) -> Logits:
        """Feed what the cache lacks of `token_ids` [n]; the logits row after the last of them."""
        window = self._window(token_ids, most)
        self._cache.reuse(window)
        return self._cache.feed(window[self._cache.length :])

    def _window(self, token_ids: TokenIds, most: int) -> TokenIds:
        """The text as the draft sees it: all of it, or its first token and the latest part that fits.

        Once it has slid it stays so, though a shorter draft might let the whole text fit again.
        """
        capacity = self._engine.facts.context_length - most
        if token_ids.size <= self._window_start:
            self._window_start = 1
        if self._window_start == 1 and self._cache.latest_fitting(token_ids, capacity) == token_ids.size:
            return token_ids
        behind_first = self._cache.latest_fitting(token_ids, capacity - self._cache.most_per_token)
        if token_ids.size - self._window_start > behind_first:
            self._window_start = token_ids.size - self._cache.latest_fitting(token_ids, capacity // 2)
        return np.concatenate((token_ids[:1], token_ids[self._window_start :]))

    def _chain(self, request: DraftRequest, logits: Logits, most: int, temperature: DraftTemperature) -> Draft:
        chain = DrawnChain(request, most, self._end_ids, temperature.sampler(request.sampler))
        chain.add(logits)
        while chain.is_open:
            chain.add(self._feed(np.array(chain.token_ids[-1:], np.int32)))
        if not request.needs_distributions:
            temperature.drafted(request.token_ids.size, chain.token_ids, chain.distributions)
        return chain.as_draft()

    @property
    def _end_ids(self) -> frozenset[int]:
        return self._cache.end_ids

    def _feed(self, token_ids: TokenIds) -> Logits:
        return self._cache.feed(token_ids)

    def num_uncached(self, token_ids: TokenIds) -> int:
        room = self._engine.facts.context_length
        if self._window_start > 1 or self._cache.latest_fitting(token_ids, room) < token_ids.size:
            return 1  # the window slides seldom; what that costs shows in the time of a draft
        return token_ids.size - self._cache.shared_length(token_ids)

    @property
    def engine(self) -> Engine | None:
        return self._engine

    def reset_engine(self) -> Engine | None:
        self._cache.rollback(0)
        return self._engine

    @property
    def bytes_used(self) -> int:
        facts = self._engine.facts
        return facts.weight_bytes + facts.kv_bytes_per_token * facts.context_length

    def set_threads(self, threads: int) -> None:
        self._engine.set_threads(min(threads, self._engine.facts.threads))

    def cancel(self) -> None:
        self._engine.cancel()

    def clear_cancel(self) -> None:
        self._engine.clear_cancel()

    def close(self) -> None:
        self._engine.close()

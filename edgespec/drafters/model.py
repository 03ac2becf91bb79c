"""The draft model: a small model on any engine drafts a chain token by token.

Its context is its own: when the text outgrows it, the window keeps the first token (attention sinks there) and slides
in half-window jumps, so that the cost of a slide is spread over many tokens and acceptance has no cliff.
"""

from __future__ import annotations

import math

import numpy as np

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.temperature import DraftTemperature, Factor
from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import Cancelled
from edgespec.noise import Stream
from edgespec.types import EMPTY_DRAFT, Distribution, Draft, Evidence, Logits, TokenIds

_FOLD, _SHORT_ROW = 64, 8192  # logits of which the largest counts, in rows that are longer


class ModelDrafter(Drafter):
    """Drafts with `engine`, which it owns and closes; `cache` shows another vocabulary as the target's.

    `temperature`: that of the draft over the target's, or "auto".
    """

    name = "model"

    def __init__(
        self,
        engine: Engine,
        cache: CachedSequence | None = None,
        notes: tuple[str, ...] = (),
        temperature: Factor = 1.0,
    ) -> None:
        self.notes = notes
        self._temperature = DraftTemperature(temperature)
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
        room = self._engine.facts.context_length
        most = min(request.max_tokens, room // 4)
        if most < 1:
            return EMPTY_DRAFT
        self._temperature.learn(request.sampler, request.token_ids)
        try:
            logits = self.catch_up(request.token_ids, most)
            return self._chain(request, logits, most)
        except Cancelled:
            self._cache.restore()
            raise

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

    def _chain(self, request: DraftRequest, logits: Logits, most: int) -> Draft:
        sampler = self._temperature.sampler(request.sampler)
        stream = Stream.DRAFT if request.needs_distributions else Stream.TARGET
        history = request.token_ids
        chosen: list[int] = []
        evidence: list[Evidence] = []
        distributions: list[Distribution] = []
        while True:
            distribution = sampler.distribution(logits, history)
            # Draws of its own must not come again in a later round, since what was kept of this one depends on them.
            index = request.num_drafted + len(chosen) if request.needs_distributions else 0
            token_id, lead = sampler.race(distribution, request.token_ids.size + len(chosen), stream, index)
            chosen.append(token_id)
            evidence.append(evidence_of(logits, distribution.prob_of(token_id), lead))
            distributions.append(distribution)
            if len(chosen) == most or token_id in self._end_ids:
                break
            if request.worth_going_on is not None and not request.worth_going_on(len(chosen), evidence[-1]):
                break
            if sampler.sampling.uses_history:
                history = np.append(history, np.int32(token_id))
            logits = self._feed(np.array([token_id], np.int32))
        if not request.needs_distributions:
            self._temperature.drafted(request.token_ids.size, chosen, distributions)
        given = distributions if request.needs_distributions else None
        return Draft.chain(chosen, distributions=given, evidence=evidence)

    @property
    def _end_ids(self) -> frozenset[int]:
        return self._cache.end_ids

    def _feed(self, token_ids: TokenIds) -> Logits:
        return self._cache.feed(token_ids)

    def lag(self, token_ids: TokenIds) -> int:
        room = self._engine.facts.context_length
        if self._window_start > 1 or self._cache.latest_fitting(token_ids, room) < token_ids.size:
            return 1  # the window slides seldom; what that costs shows in the time of a draft
        return token_ids.size - self._cache.shared_length(token_ids)

    def emptied(self) -> Engine | None:
        self._cache.rollback(0)
        return self._engine

    @property
    def bytes_used(self) -> int:
        facts = self._engine.facts
        return facts.weight_bytes + facts.kv_bytes_per_token * facts.context_length

    def cancel(self) -> None:
        self._engine.cancel()

    def clear_cancel(self) -> None:
        self._engine.clear_cancel()

    def close(self) -> None:
        self._engine.close()


def evidence_of(logits: Logits, prob: float, lead: float) -> Evidence:
    """What speaks for a drafted token: log odds of the likeliest one, the token's own probability, and its lead.

    `logits` [vocabulary]; the odds are of the plain softmax, since a greedy distribution says 1 of everything. `lead`:
    of the race that drew the token (Sampler.race), which the target runs with its own probabilities; where no other
    token ran, the margin of the logits stands for it. A whole softmax would cost more than this may: only the largest
    of every few logits count, and what the others weigh together is learnt with the slopes.
    """
    fold = _FOLD if logits.size > _SHORT_ROW else 1
    largest = logits[: logits.size // fold * fold].reshape(fold, -1).max(axis=0)
    place = largest.argmax()
    best, largest[place] = float(largest[place]), -math.inf
    others = float(np.exp(largest - best).sum())
    odds = -math.log(max(others, 1e-6))
    ahead = best - float(largest.max()) if math.isinf(lead) else lead
    return max(-3.0, min(odds, 6.0)) / 2.0, max(math.log(max(prob, 1e-9)), -4.0), min(ahead, 8.0) / 4.0

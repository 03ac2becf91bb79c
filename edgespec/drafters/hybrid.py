"""Free drafters first, the draft model behind their tokens: copied where the text repeats itself, predicted elsewhere.

A lookup knows nothing of what it copies, so how often its tokens stood is counted per kind of match, on the text
itself and whether they were drafted or not. They are taken as long as each is likelier to stand than the draft model's
own are worth waiting for; the draft model then reads them in one pass and goes on. Its cache treats them as the
speculation that they are: the next round rolls back to what was committed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import EMPTY_DRAFT, Draft, Evidence, TokenIds, Verdict, one_hot

_LEAST_CONFIDENCE = 0.8  # a free token below it is left to the draft model
_PRIOR, _PRIOR_WEIGHT, _MEMORY = 0.5, 4.0, 0.98
_SCORES = 3  # of the draft model's evidence


class Lookup:
    """One free drafter, and how often its tokens stood by the evidence that they came with."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._counts: dict[tuple[int, ...], list[float]] = {}  # [stood, tried], older ones fading
        self._last: tuple[int, Draft] = 0, EMPTY_DRAFT  # where its last draft began

    def begin(self, prompt_ids: TokenIds) -> None:
        self.drafter.begin(prompt_ids)
        self._last = 0, EMPTY_DRAFT

    def draft(self, request: DraftRequest) -> tuple[TokenIds, list[float]]:
        """(its tokens [n], how likely each stands if those before it do)."""
        self._learn(request.token_ids)
        draft = self.drafter.draft(request)
        self._last = request.token_ids.size, draft
        return draft.token_ids, [self._probability(one) for one in draft.evidence or ()]

    def _learn(self, token_ids: TokenIds) -> None:
        """Compare the last draft with the text that came."""
        start, draft = self._last
        for drafted, told, evidence in zip(
            draft.token_ids.tolist(), token_ids[start:].tolist(), draft.evidence or (), strict=False
        ):
            counts = self._counts.setdefault(_kind(evidence), [_PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT])
            counts[0] = counts[0] * _MEMORY + (drafted == told)
            counts[1] = counts[1] * _MEMORY + 1.0
            if drafted != told:
                return

    def _probability(self, evidence: Evidence) -> float:
        stood, tried = self._counts.get(_kind(evidence), (_PRIOR, 1.0))
        return stood / tried


def _kind(evidence: Evidence) -> tuple[int, ...]:
    """Proposals that are alike; half a unit of a score is a difference."""
    return tuple(round(2 * value) for value in evidence)


class HybridDrafter(Drafter):
    """Drafts with `free` drafters, which it owns, and with `model`, which it shares and does not close."""

    name = "hybrid"
    evidence_kind = "scores"  # 1 and the log odds of a free token; 0, 0 and the model's scores of one of its own

    def __init__(self, free: Sequence[Drafter], model: Drafter, least_confidence: float = _LEAST_CONFIDENCE) -> None:
        self._lookups = [Lookup(drafter) for drafter in free]
        self._model = model
        self._least_confidence = least_confidence
        self._num_free = 0  # tokens of the last draft that were copied
        self._source: Lookup | None = None  # from where

    def begin(self, prompt_ids: TokenIds) -> None:
        for lookup in self._lookups:
            lookup.begin(prompt_ids)
        self._model.begin(prompt_ids)
        self._source = None

    def draft(self, request: DraftRequest) -> Draft:
        """A chain; under a rule that compares distributions a copied token was certain to be drafted."""
        copied, confidences = self._copied(request)
        evidence: list[Evidence] = []
        for count, confidence in enumerate(confidences, 1):
            evidence.append((1.0, _log_odds(confidence), *[0.0] * _SCORES))
            if request.should_continue is not None and not request.should_continue(count, evidence[-1]):
                return self._chain(request, copied[:count], evidence, EMPTY_DRAFT)
        if copied.size == request.max_tokens:
            return self._chain(request, copied, evidence, EMPTY_DRAFT)
        return self._chain(request, copied, evidence, self._continued(request, copied))

    def _copied(self, request: DraftRequest) -> tuple[TokenIds, list[float]]:
        """The free draft of which most tokens are expected to stand, as far as each is likely enough."""
        best: tuple[TokenIds, list[float]] = EMPTY_DRAFT.token_ids, []
        self._source, most = None, 0.0
        for lookup in self._lookups:
            token_ids, confidences = lookup.draft(request)
            kept = next((i for i, one in enumerate(confidences) if one < self._least_confidence), len(confidences))
            expected = float(np.cumprod(confidences[:kept]).sum())
            if expected > most:
                best, most, self._source = (token_ids[:kept], confidences[:kept]), expected, lookup
        return best

    def _continued(self, request: DraftRequest, copied: TokenIds) -> Draft:
        """What the draft model adds behind the `copied` tokens [n]."""
        ask = request.should_continue
        count = int(copied.size)
        behind = request._replace(
            token_ids=np.concatenate((request.token_ids, copied)) if count else request.token_ids,
            max_tokens=request.max_tokens - count,
            num_drafted=count,
            should_continue=None if ask is None else lambda done, scores: ask(count + done, (0.0, 0.0, *scores)),
        )
        return self._model.draft(behind)

    def _chain(self, request: DraftRequest, copied: TokenIds, evidence: list[Evidence], model: Draft) -> Draft:
        self._num_free = int(copied.size)
        evidence = evidence[: copied.size] + [(0.0, 0.0, *scores) for scores in model.evidence or ()]
        distributions = None
        if request.needs_distributions:
            distributions = [*map(one_hot, copied.tolist()), *(model.distributions or ())]
        return Draft.chain(np.concatenate((copied, model.token_ids)), None, distributions, evidence)

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        if self._source is not None:
            self._source.drafter.observe(draft.first(self._num_free), verdict)

    def num_uncached(self, token_ids: TokenIds) -> int:
        return self._model.num_uncached(token_ids)

    @property
    def bytes_used(self) -> int:
        """The tables of the free drafters; the draft model is counted where it belongs."""
        return sum(lookup.drafter.bytes_used for lookup in self._lookups)

    def cancel(self) -> None:
        self._model.cancel()

    def clear_cancel(self) -> None:
        self._model.clear_cancel()

    def close(self) -> None:
        for lookup in self._lookups:
            lookup.drafter.close()


def _log_odds(probability: float) -> float:
    probability = min(max(probability, 0.01), 0.99)
    return math.log(probability / (1.0 - probability)) / 2.0

"""What a request itself says of its answer: the tokens that its grammar forces, and those that its caller predicts.

A grammar forces bytes, and the model chooses how to spell them, so these tokens are a draft like any other. A
prediction (`GenerateOptions.prediction`, OpenAI's Predicted Outputs) is followed by the answer; where it departs, the
latest tokens are looked up in the prediction, nearest ahead first, so that an edit costs about one plain pass.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import EMPTY_DRAFT, Draft, TokenIds

FORCED, PREDICTION = "forced", "prediction"
_USUAL = 0.95  # share of the forced tokens that is accepted
_MAX_NGRAM = 4
_BYTES_PER_TOKEN = 600  # four dictionary entries with their keys and place lists, as in `ngram`


class ForcedDrafter(Drafter):
    """Drafts `Sampler.forced`. It has no state."""

    name = FORCED
    is_free = True
    prior = (3.0,)  # models nearly always spell what they must write as they learnt to

    def serves(self, request: DraftRequest) -> bool:
        return request.sampler.constraint is not None

    def draft(self, request: DraftRequest) -> Draft:
        """A chain; empty where nothing is forced."""
        forced = request.sampler.forced(request.token_ids)[: request.max_tokens]
        if not forced:
            return EMPTY_DRAFT
        return Draft.chain(forced, [_USUAL] * len(forced), evidence=[()] * len(forced))


class PredictedDrafter(Drafter):
    """Drafts `DraftRequest.predicted_ids`. It is made for every controller and drafts nothing without a prediction."""

    name = PREDICTION
    is_free = True
    prior = (1.5, 1.0)  # the caller says that it will come about so

    def __init__(self) -> None:
        self.begin(np.empty(0, np.int32))

    def begin(self, prompt_ids: TokenIds) -> None:
        self._given: TokenIds | None = None
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._num_read, self._at, self._num_matched = prompt_ids.size, 0, 0
        self._known = 0  # where the answer last agreed; behind that `_at` is a guess
        self._latest: tuple[int, ...] = ()

    def serves(self, request: DraftRequest) -> bool:
        return request.predicted_ids is not None

    def draft(self, request: DraftRequest) -> Draft:
        """A chain of what comes next in the prediction; empty where the answer's place in it is not known."""
        if self._given is not request.predicted_ids:
            self._index(request.predicted_ids)
        for token_id in request.token_ids[self._num_read :].tolist():
            self._follow(token_id)
        self._num_read = request.token_ids.size
        chosen = self._ids[self._at : self._at + request.max_tokens]
        if not chosen:
            return EMPTY_DRAFT
        evidence = [(math.log2(self._num_matched + count) / 2.0 - 1.0,) for count in range(1, len(chosen) + 1)]
        return Draft.chain(chosen, evidence=evidence)

    @property
    def bytes_used(self) -> int:
        return _BYTES_PER_TOKEN * len(self._ids)

    def _index(self, predicted_ids: TokenIds | None) -> None:
        self._given = predicted_ids
        self._ids = [] if predicted_ids is None else predicted_ids.tolist()
        for end in range(1, len(self._ids) + 1):
            for size in range(1, min(_MAX_NGRAM, end) + 1):
                self._places.setdefault(tuple(self._ids[end - size : end]), []).append(end)

    def _follow(self, token_id: int) -> None:
        """The answer goes on with `token_id`."""
        self._latest = (*self._latest, token_id)[-_MAX_NGRAM:]
        if self._ids[self._at : self._at + 1] == [token_id]:
            self._at, self._num_matched = self._at + 1, self._num_matched + 1
            self._known = self._at
            return
        for size in range(len(self._latest), 0, -1):
            places = self._places.get(self._latest[-size:])
            if places is not None:
                ahead = bisect_right(places, self._known)
                self._at = self._known = places[min(ahead, len(places) - 1)]
                self._num_matched = size
                return
        self._at, self._num_matched = self._at + 1, 0  # another token in place of the predicted one

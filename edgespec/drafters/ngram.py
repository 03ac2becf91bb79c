"""Prompt lookup: finds an earlier occurrence of the latest tokens and proposes what followed it (no model, no cost).

An index from each n-gram to its latest few places makes a lookup independent of the length of the text; of a long text
it keeps at least the latest half, so that memory is bounded and no token is indexed twice. A place whose first proposed
token was just rejected is skipped, so that a loop in the text is not proposed again and again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import EMPTY_DRAFT, Draft, Evidence, TokenIds, Verdict

_BYTES_PER_TOKEN = 36  # a number and its place in a list, measured on CPython 3.11


class FollowedText:
    """The token ids of the text that was drafted for last."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._may_differ = False

    def begin(self, prompt_ids: TokenIds) -> None:
        """A generation starts; its prompt is read with the first draft, if there is one. An empty one frees memory."""
        self._may_differ = True
        if not prompt_ids.size:
            self.ids = []

    def grow(self, token_ids: TokenIds) -> int:
        """Hold the text `token_ids` [n]; the place from which on it is new, 0 where it does not continue the last."""
        known = len(self.ids)
        if self._may_differ:
            self._may_differ = False
            if token_ids.size < known or token_ids[:known].tolist() != self.ids:
                self.ids, known = [], 0
        self.ids += token_ids[known:].tolist()
        return known

    @property
    def bytes_used(self) -> int:
        return _BYTES_PER_TOKEN * len(self.ids)


def looked_up(request: DraftRequest, found: Iterable[tuple[int, Evidence]]) -> Draft:
    """A chain of tokens with their evidence, as far as the request wants them and they are expected to pay."""
    chosen: list[int] = []
    evidence: list[Evidence] = []
    for token_id, scores in islice(found, request.max_tokens):
        chosen.append(token_id)
        evidence.append(scores)
        if request.should_continue is not None and not request.should_continue(len(chosen), scores):
            break
    return Draft.chain(chosen, evidence=evidence)


_MAX_NGRAM, _REFUSALS_KEPT = 4, 32
_BYTES_PER_PLACE = 120  # one dictionary entry with its key and place list, measured on CPython 3.11


class NgramDrafter(Drafter):
    """Copies the continuation of the longest earlier match of 4 down to `min_ngram` tokens."""

    name = "ngram"
    is_free = True

    def __init__(self, min_ngram: int = 2, places_kept: int = 4, max_indexed: int = 1 << 17) -> None:
        self._sizes = range(_MAX_NGRAM, min_ngram - 1, -1)
        self._places_kept, self._max_indexed = places_kept, max_indexed
        self._text = FollowedText()
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._older_places: dict[tuple[int, ...], list[int]] = {}
        self._next_half = max_indexed // 2  # tokens at which the older places are dropped
        self._refused: deque[int] = deque(maxlen=_REFUSALS_KEPT)
        self._source: tuple[int, int] | None = None  # n-gram size and place of the last draft

    def begin(self, prompt_ids: TokenIds) -> None:
        self._refused.clear()
        self._source = None
        self._text.begin(prompt_ids)
        if not prompt_ids.size:
            self._clear()

    def draft(self, request: DraftRequest) -> Draft:
        self._extend(request.token_ids)
        self._source = self._find()
        if self._source is None:
            return EMPTY_DRAFT
        size, place = self._source
        copied = self._copy(place, request.max_tokens)
        return Draft.chain(copied, evidence=[(math.log2(size + count) - 2.0,) for count in range(len(copied))])

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        if self._source is not None and draft.num_tokens and not verdict.accepted_nodes:
            self._refused.append(self._source[1])

    @property
    def bytes_used(self) -> int:
        return (len(self._places) + len(self._older_places)) * _BYTES_PER_PLACE + self._text.bytes_used

    def _extend(self, token_ids: TokenIds) -> None:
        """Index the new tokens; a place is where an n-gram's continuation begins."""
        if not (start := self._text.grow(token_ids)):
            self._clear()
        ids = self._text.ids
        for end in range(start, len(ids)):
            # the n-grams that end here are indexed when their continuation arrives, so none matches itself
            if end >= self._next_half:
                self._places, self._older_places = {}, self._places
                self._next_half += self._max_indexed // 2
            for size in self._sizes:
                if size <= end:
                    places = self._places.setdefault(tuple(ids[end - size : end]), [])
                    places.append(end)
                    del places[: -self._places_kept]

    def _clear(self) -> None:
        self._places, self._older_places = {}, {}
        self._next_half = self._max_indexed // 2

    def _find(self) -> tuple[int, int] | None:
        """(n-gram size, place) of the longest match, the latest of its places that was not just refused."""
        for size in self._sizes:
            latest = tuple(self._text.ids[-size:])
            for places in (self._places.get(latest, ()), self._older_places.get(latest, ())):
                for place in reversed(places):
                    if place not in self._refused:
                        return size, place
        return None

    def _copy(self, place: int, count: int) -> list[int]:
        """`count` tokens from `place` on; at the end of the text the copy repeats itself."""
        ids = self._text.ids
        copied, period = ids[place : place + count], len(ids) - place
        while len(copied) < count:
            copied.append(copied[len(copied) - period])
        return copied

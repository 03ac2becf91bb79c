"""Prompt lookup: finds an earlier occurrence of the latest tokens and proposes what followed it (no model, no cost).

An index from each n-gram to its latest place makes a lookup independent of the length of the text; of a long text it
keeps at least the latest half. A place whose first token was just rejected is not proposed from again, so that a loop
in the text is not drafted over and over.
"""

from __future__ import annotations

import math
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


def looked_up(request: DraftRequest, found: Iterable[tuple[int, Evidence]], most: int) -> Draft:
    """A chain of at most `most` tokens with their evidence, as long as the request wants more of them."""
    chosen: list[int] = []
    evidence: list[Evidence] = []
    for token_id, scores in islice(found, min(most, request.max_tokens)):
        chosen.append(token_id)
        evidence.append(scores)
        if request.should_continue is not None and not request.should_continue(len(chosen), scores):
            break
    return Draft.chain(chosen, evidence=evidence)


_MAX_NGRAM = 4
_BYTES_PER_PLACE = 120  # one dictionary entry with its key, measured on CPython 3.11


class NgramDrafter(Drafter):
    """Copies what followed the longest earlier match of 4 down to `min_ngram` tokens, from its latest place on.

    At most `max_indexed` tokens of the text are indexed, the latest ones.
    """

    name = "ngram"
    is_free = True

    def __init__(self, min_ngram: int = 2, max_indexed: int = 1 << 17) -> None:
        self._sizes, self._max_indexed = range(_MAX_NGRAM, min_ngram - 1, -1), max_indexed
        self._text = FollowedText()
        self._places: dict[tuple[int, ...], int] = {}  # where an n-gram's continuation begins
        self._first = 0  # of the tokens that are indexed
        self._source = self._refused = -1  # place of the last draft; the place whose first token was rejected last

    def begin(self, prompt_ids: TokenIds) -> None:
        self._source = self._refused = -1
        self._text.begin(prompt_ids)
        if not prompt_ids.size:
            self._places, self._first = {}, 0

    def draft(self, request: DraftRequest) -> Draft:
        """`request.max_tokens` tokens; at the end of the text the copy repeats itself."""
        self._index(request.token_ids)
        ids, self._source = self._text.ids, -1
        for size in self._sizes:
            place = self._places.get(tuple(ids[-size:]), -1)
            if place not in (-1, self._refused):
                self._source, count = place, request.max_tokens
                copied, period = ids[place : place + count], len(ids) - place
                while len(copied) < count:
                    copied.append(copied[len(copied) - period])
                return Draft.chain(copied, evidence=[(math.log2(size + number) - 2.0,) for number in range(count)])
        return EMPTY_DRAFT

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        if self._source >= 0 and draft.num_tokens:
            self._refused = -1 if verdict.accepted_nodes else self._source

    @property
    def bytes_used(self) -> int:
        return len(self._places) * _BYTES_PER_PLACE + self._text.bytes_used

    def _index(self, token_ids: TokenIds) -> None:
        """An n-gram is indexed when its continuation arrives, so none matches itself."""
        if not (start := self._text.grow(token_ids)):
            self._places, self._first = {}, 0
        ids = self._text.ids
        if len(ids) - self._first > self._max_indexed:
            self._places, self._first = {}, len(ids) - self._max_indexed // 2
        for end in range(max(start, self._first), len(ids)):
            for size in self._sizes:
                if size <= end:
                    self._places[tuple(ids[end - size : end])] = end

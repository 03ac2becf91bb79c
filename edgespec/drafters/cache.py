"""The n-gram cache: what mostly followed the latest tokens, in this text and in what models wrote in earlier ones.

A draft is made token by token: of the longest n-gram that is known anywhere, the token that mostly followed it. Where
this text knows one it counts before earlier texts do. Which earlier texts there are is told by whoever makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.counts import MAX_VOCABULARY, SIZES, CountTable, Following, GrowingCounts, keys_of
from edgespec.errors import CapabilityError
from edgespec.types import Draft, Evidence, TokenIds

_LEAST_REACH = 0.2  # a draft ends where its tokens so far stood together less often than this: asking costs as well


class CacheDrafter(Drafter):
    """Drafts from n-grams of the text, of answers that it was told of (`learn`), and of `earlier` ones."""

    name = "cache"
    is_free = True
    evidence_kind = "scores"

    def __init__(self, vocabulary_size: int, earlier: Iterable[TokenIds] = ()) -> None:
        if vocabulary_size > MAX_VOCABULARY:
            raise CapabilityError(
                f"drafter 'cache' takes up to {MAX_VOCABULARY} token ids and this vocabulary has {vocabulary_size}: "
                "use --drafter suffix"
            )
        self._earlier = CountTable(earlier)
        self._told = GrowingCounts()
        self._text = GrowingCounts()
        self._ids: list[int] = []
        self._is_new = False

    def begin(self, prompt_ids: TokenIds) -> None:
        """As the contract says; an empty prompt means that the answers of this process are forgotten too."""
        self._is_new = True  # the prompt is counted with the first draft: who never asks does not pay
        if not prompt_ids.size:
            self._told.clear()
            self._forget()

    def draft(self, request: DraftRequest) -> Draft:
        self._extend(request.token_ids)
        latest = self._ids[-SIZES[0] :]
        chosen: list[int] = []
        evidence: list[Evidence] = []
        reach = 1.0
        while len(chosen) < request.max_tokens and reach >= _LEAST_REACH:
            found = self._following(latest)
            if found is None:
                break
            size, (token_id, count, total), origin = found
            share = (count + 0.5) / (total + 1.0)
            reach *= share
            chosen.append(token_id)
            evidence.append((size / 3.0 - 1.0, math.log(share / (1.0 - share)) / 2.0, origin))
            latest = [*latest[-SIZES[0] + 1 :], token_id]
        return Draft.chain(chosen, evidence=evidence)

    def learn(self, answer_ids: TokenIds) -> None:
        """An answer [n] of this process is over; later texts may draft from it."""
        self._told.add(answer_ids.tolist(), 0)

    @property
    def bytes_used(self) -> int:
        tables = (self._earlier, self._told, self._text)
        return sum(table.bytes_used for table in tables) + 36 * len(self._ids)

    def _extend(self, token_ids: TokenIds) -> None:
        known = len(self._ids)
        if self._is_new:
            self._is_new = False
            if token_ids.size < known or token_ids[:known].tolist() != self._ids:
                self._forget()
                known = 0
        self._ids += token_ids[known:].tolist()
        self._text.add(self._ids, known)

    def _forget(self) -> None:
        self._ids = []
        self._text.clear()

    def _following(self, latest: list[int]) -> tuple[int, Following, float] | None:
        """(size of the n-gram, what follows it, 0 in this text or -1 in another) of the longest n-gram known."""
        keys = keys_of(latest)
        for size, key in zip(SIZES[len(SIZES) - len(keys) :], keys, strict=True):
            if (found := self._text.get(key)) is not None:
                return size, found, 0.0
            if (found := self._told.get(key) or self._earlier.get(key)) is not None:
                return size, found, -1.0
        return None

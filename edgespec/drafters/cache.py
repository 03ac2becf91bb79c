"""The n-gram cache: the tokens that most often followed the latest ones, in this text and in earlier answers.

A draft is made token by token: the token that most often followed the longest known n-gram. Counts of this text take
precedence over those of earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.counts import MAX_VOCABULARY, SIZES, CountTable, Following, GrowingCounts, keys_of
from edgespec.drafters.followed_text import FollowedText
from edgespec.errors import CapabilityError
from edgespec.types import Draft, Evidence, TokenIds

_LEAST_REACH = 0.2  # the probability of all tokens so far, below which a draft that nobody else ends is over


class CacheDrafter(Drafter):
    """Drafts from n-grams of the text, of this process's answers (`learn`) and of `earlier` ones [tokens of each]."""

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
        self._answers = GrowingCounts()
        self._text, self._counts = FollowedText(), GrowingCounts()

    def begin(self, prompt_ids: TokenIds) -> None:
        """An empty prompt also clears the answers of this process."""
        self._text.begin(prompt_ids)
        if not prompt_ids.size:
            self._answers.clear()
            self._counts.clear()

    def draft(self, request: DraftRequest) -> Draft:
        if not (start := self._text.grow(request.token_ids)):
            self._counts.clear()
        self._counts.add(self._text.ids, start)
        latest = self._text.ids[-SIZES[0] :]
        chosen: list[int] = []
        evidence: list[Evidence] = []
        reach = 1.0
        while len(chosen) < request.max_tokens and (found := self._following(latest)) is not None:
            size, (token_id, count, total), origin = found
            share = (count + 0.5) / (total + 1.0)
            chosen.append(token_id)
            evidence.append((size / 3.0 - 1.0, math.log(share / (1.0 - share)) / 2.0, origin))
            reach *= share
            may_pay = reach >= _LEAST_REACH
            if request.should_continue is not None:
                may_pay = request.should_continue(len(chosen), evidence[-1])
            if not may_pay:
                break
            latest = [*latest[-SIZES[0] + 1 :], token_id]
        return Draft.chain(chosen, evidence=evidence)

    def learn(self, answer_ids: TokenIds) -> None:
        """An answer [n] is complete; later texts may draft from it."""
        self._answers.add(answer_ids.tolist(), 0)

    def another(self, sequence: int) -> Drafter | None:
        """It drafts from the same answers."""
        found = CacheDrafter(MAX_VOCABULARY)
        found._earlier, found._answers = self._earlier, self._answers
        return found

    @property
    def bytes_used(self) -> int:
        return sum(part.bytes_used for part in (self._earlier, self._answers, self._counts, self._text))

    def _following(self, latest: list[int]) -> tuple[int, Following, float] | None:
        """(size of the n-gram, what follows it, 0 in this text or -1 in another) of the longest n-gram known."""
        keys = keys_of(latest)
        for size, key in zip(SIZES[len(SIZES) - len(keys) :], keys, strict=True):
            if (found := self._counts.get(key)) is not None:
                return size, found, 0.0
            if (found := self._answers.get(key) or self._earlier.get(key)) is not None:
                return size, found, -1.0
        return None

"""Suffix decoding: continues the longest suffix of the text that occurred before with its most frequent continuation.

After SuffixDecoding (arXiv 2411.04975), with an automaton instead of a tree: the longest match costs nothing to find,
and each token of the draft is the continuation with the highest count on the path so far. Corpora are searched too; the
longest match wins, with a small bonus for the text itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgespec.corpus.index import SuffixIndex
from edgespec.drafters.automaton import ROOT, SuffixAutomaton
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.corpus import CorpusMatch
from edgespec.drafters.followed_text import FollowedText
from edgespec.types import EMPTY_DRAFT, Draft, Evidence, TokenIds

_GROWTH = 4  # most tokens drafted per token of the match; longer drafts are rarely right
_NEARER = 2  # bonus in tokens for a match in the text: a corpus may be about something else


class SuffixDrafter(Drafter):
    """Continues the text from its own earlier tokens and from `corpora`.

    At most `max_indexed` tokens of the text are indexed, the latest ones.
    """

    name = "suffix"
    is_free = True
    evidence_kind = "scores"

    def __init__(self, min_match: int = 1, max_indexed: int = 1 << 16, corpora: Sequence[SuffixIndex] = ()) -> None:
        self._min_match, self._max_indexed = min_match, max_indexed
        self._text = FollowedText()
        self._automaton = SuffixAutomaton()
        self._corpora = tuple(map(CorpusMatch, corpora))

    def another(self, sequence: int) -> Drafter | None:
        """It searches the same corpora."""
        return SuffixDrafter(self._min_match, self._max_indexed, [corpus.index for corpus in self._corpora])

    def begin(self, prompt_ids: TokenIds) -> None:
        self._text.begin(prompt_ids)
        if not prompt_ids.size:
            self._clear()

    def draft(self, request: DraftRequest) -> Draft:
        """A copy of what followed the longest match, at most `_GROWTH` times as long as the match."""
        self._index(request.token_ids)
        length = self._automaton.match[1]
        if self._corpora:
            for corpus in self._corpora:
                corpus.follow(self._text.ids)
            longest = max(self._corpora, key=lambda corpus: corpus.length)
            if longest.length > (length + _NEARER if length else self._min_match - 1):
                return self._copied_from_corpus(longest, request.at_most(_GROWTH * longest.length))
        return self._copied(request.at_most(_GROWTH * length)) if length >= self._min_match else EMPTY_DRAFT

    def _copied(self, request: DraftRequest) -> Draft:
        """From the text itself."""
        state, length = self._automaton.match
        chosen: list[int] = []
        evidence: list[Evidence] = []
        while state != ROOT and len(chosen) < request.max_tokens:
            found = list(self._automaton.continuations(state))
            if not found:
                break
            token_id, following, count = max(found, key=lambda one: one[2])
            total = max(sum(one[2] for one in found), self._automaton.occurrences(state))
            chosen.append(token_id)
            evidence.append(_evidence(length + len(chosen) - 1, count, total, 0.0))
            if request.should_continue is not None and not request.should_continue(len(chosen), evidence[-1]):
                break
            state = following
        return Draft.chain(chosen, evidence=evidence)

    def _copied_from_corpus(self, corpus: CorpusMatch, request: DraftRequest) -> Draft:
        chosen: list[int] = []
        evidence: list[Evidence] = []
        for length, (token_id, share, places) in enumerate(corpus.continued(request.max_tokens), corpus.length):
            chosen.append(token_id)
            evidence.append(_evidence(length, share * places, places, -1.0))
            if request.should_continue is not None and not request.should_continue(len(chosen), evidence[-1]):
                break
        return Draft.chain(chosen, evidence=evidence)

    @property
    def bytes_used(self) -> int:
        corpora_bytes = sum(corpus.bytes_used for corpus in self._corpora)
        return self._automaton.bytes_used + self._text.bytes_used + corpora_bytes

    def _index(self, token_ids: TokenIds) -> None:
        if not (start := self._text.grow(token_ids)):
            self._clear()
        new = self._text.ids[start:]
        if self._automaton.num_tokens + len(new) <= self._max_indexed:
            self._automaton.extend(new)
        else:
            # Half is dropped at once, so that each token is indexed at most twice.
            self._automaton = SuffixAutomaton()
            self._automaton.extend(self._text.ids[-(self._max_indexed // 2) :])

    def _clear(self) -> None:
        self._automaton = SuffixAutomaton()
        for corpus in self._corpora:
            corpus.restart()


def _evidence(match_length: int, count: float, total: int, origin: float) -> Evidence:
    """Scores of a continuation: the length of the match, its share of all continuations, their number, and `origin`.

    `origin`: 0 in the text itself, -1 in the corpus, which may be about something else.
    """
    share = (count + 0.5) / (total + 1.0)
    known = math.log2(match_length) / 2.0 - 1.0, math.log(share / (1.0 - share)) / 2.0, math.log2(total) / 4.0
    return (*known, origin)

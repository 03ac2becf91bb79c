"""Suffix decoding: the longest suffix of the text that occurred before is continued as it most often was.

After SuffixDecoding (arXiv 2411.04975), with an automaton in place of a tree: the match is as long as it can be and
costs nothing to find, and each token of the draft is the continuation with the highest count on the path so far.
"""

from __future__ import annotations

import math

from edgespec.drafters.automaton import ROOT, SuffixAutomaton
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import EMPTY_DRAFT, Draft, Evidence, TokenIds


class SuffixDrafter(Drafter):
    """Continues the text from what it holds itself; `max_indexed` tokens are remembered at most, the latest ones."""

    name = "suffix"
    is_free = True
    evidence_kind = "scores"

    def __init__(self, min_match: int = 1, max_indexed: int = 1 << 16) -> None:
        self._min_match, self._max_indexed = min_match, max_indexed
        self._ids: list[int] = []
        self._start = 0  # how many of the first `_ids` the automaton has forgotten
        self._automaton = SuffixAutomaton()
        self._is_new = False

    def begin(self, prompt_ids: TokenIds) -> None:
        self._is_new = True  # the prompt is indexed with the first draft: who never asks does not pay

    def draft(self, request: DraftRequest) -> Draft:
        self._index(request.token_ids)
        state, length = self._automaton.match
        if length < self._min_match or state == ROOT:
            return EMPTY_DRAFT
        chosen: list[int] = []
        evidence: list[Evidence] = []
        while len(chosen) < request.max_tokens:
            found = list(self._automaton.continuations(state))
            if not found:
                break
            token_id, following, count = max(found, key=lambda one: one[2])
            total = sum(one[2] for one in found)
            chosen.append(token_id)
            evidence.append(_evidence(length + len(chosen) - 1, count, total))
            state = following
        return Draft.chain(chosen, evidence=evidence)

    @property
    def bytes_used(self) -> int:
        return self._automaton.bytes_used + 36 * len(self._ids)

    def _index(self, token_ids: TokenIds) -> None:
        if self._is_new:
            self._is_new, known = False, len(self._ids)
            if token_ids.size < known or token_ids[:known].tolist() != self._ids:
                self._ids, self._start, self._automaton = [], 0, SuffixAutomaton()
        new = token_ids[len(self._ids) :].tolist()
        self._ids += new
        self._automaton.extend(new)
        if self._automaton.num_tokens > self._max_indexed:
            # Half is forgotten at once, so that each token is indexed twice at most.
            self._start = len(self._ids) - self._max_indexed // 2
            self._automaton = SuffixAutomaton()
            self._automaton.extend(self._ids[self._start :])


def _evidence(match_length: int, count: int, total: int) -> Evidence:
    """What speaks for a continuation: the length of the match, its share of all continuations, how many there were."""
    share = (count + 0.5) / (total + 1.0)
    return math.log2(match_length) / 2.0 - 1.0, math.log(share / (1.0 - share)) / 2.0, math.log2(total) / 4.0

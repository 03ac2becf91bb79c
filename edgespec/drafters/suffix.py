"""Suffix decoding: continues the longest suffix of the text that occurred before with its most frequent continuation.

After SuffixDecoding (arXiv 2411.04975), with an automaton instead of a tree: the longest match costs nothing to find,
and each token of the draft is the continuation with the highest count on the path so far. Corpora are searched too; the
longest match wins, with a small bonus for the text itself.

The automaton (Blumer et al. 1985) has one state for the substrings that end at the same places. `link` leads to the
longest suffix that ends at more places, so the longest suffix seen before is one step from the state of the whole text,
however long the text is.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from edgespec.corpus.index import DEPTH, END_OF_TEXT, LONGEST_MATCH, AnswerIndex, Span, SuffixIndex
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.ngram import FollowedText, looked_up
from edgespec.types import EMPTY_DRAFT, Draft, Evidence, TokenIds

if TYPE_CHECKING:
    from edgespec.corpus.texts import CommonTexts

ROOT, NONE = 0, -1
_COUNTED_LINKS = 24  # suffixes of each new token that are counted: longer walks happen in repetitive text only
_LOOKED_AT = 32  # continuations of one state
_BYTES_PER_STATE, _BYTES_PER_BRANCH = 20, 260


class SuffixAutomaton:
    """Built token by token in amortised constant time; at most two states a token.

    Most states have one continuation, which is kept in two flat arrays; only branching states own a dictionary.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._length, self._link, self._count = array("i", [0]), array("i", [NONE]), array("i", [0])
        self._only_token, self._only_next = array("i", [NONE]), array("i", [NONE])
        self._branches: dict[int, dict[int, int]] = {}
        self._last = ROOT

    @property
    def bytes_used(self) -> int:
        return len(self._length) * _BYTES_PER_STATE + len(self._branches) * _BYTES_PER_BRANCH

    @property
    def match(self) -> tuple[int, int]:
        """(state, length) of the longest suffix of the text that also occurs earlier in it."""
        state = self._link[self._last] if self.num_tokens else ROOT
        return state, self._length[state]

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._append(token_id)

    def best_continuation(self, state: int) -> tuple[tuple[int, int, int] | None, int]:
        """What followed the strings of `state` most often, and how often they were followed at all.

        (token, state after it, how often it occurred); None where nothing followed. Of many continuations, which only
        short strings have, the first and the latest ones are looked at: common tokens come early, and looking at all
        of them would take longer as the text grows.
        """
        branches, count = self._branches.get(state), self._count
        if branches is None:
            if (token_id := self._only_token[state]) == NONE:
                return None, 0
            following = self._only_next[state]
            return (token_id, following, count[following]), max(count[following], count[state])
        looked_at: Iterable[tuple[int, int]] = branches.items()
        if len(branches) > _LOOKED_AT:
            latest = islice(reversed(branches.items()), _LOOKED_AT // 2)
            looked_at = chain(islice(looked_at, _LOOKED_AT // 2), latest)
        best, most, total = (NONE, NONE), -1, 0
        for one in looked_at:
            often = count[one[1]]
            total += often
            if often > most:
                best, most = one, often
        return (*best, most), max(total, count[state])

    def _append(self, token_id: int) -> None:
        link, only_token, only_next, branches = self._link, self._only_token, self._only_next, self._branches
        new, state = self._new_state(self.num_tokens + 1), self._last
        while state != NONE:  # every suffix that lacks this continuation gets it; the loop is written out for speed
            if only_token[state] == NONE and state not in branches:
                only_token[state], only_next[state] = token_id, new
            else:
                following = self._next(state, token_id)
                if following != NONE:
                    break
                self._connect(state, token_id, new)
            state = link[state]
        if state == NONE:
            link[new] = ROOT
        elif self._length[following] == self._length[state] + 1:
            link[new] = following
        else:
            link[new] = self._split(state, token_id, following)
        self._last = new
        self.num_tokens += 1
        self._count_suffixes(new)

    def _count_suffixes(self, state: int) -> None:
        count, link = self._count, self._link
        for _ in range(_COUNTED_LINKS):
            count[state] += 1
            state = link[state]
            if state <= ROOT:
                break

    def _split(self, state: int, token_id: int, following: int) -> int:
        """A copy of `following` for its shorter strings only; `state` and its suffixes lead there from now on."""
        clone = self._new_state(self._length[state] + 1)
        self._link[clone], self._count[clone] = self._link[following], self._count[following]
        self._only_token[clone], self._only_next[clone] = self._only_token[following], self._only_next[following]
        if following in self._branches:
            self._branches[clone] = dict(self._branches[following])
        self._link[following] = clone
        while state != NONE and self._next(state, token_id) == following:
            self._connect(state, token_id, clone)
            state = self._link[state]
        return clone

    def _new_state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(NONE)
        self._only_token.append(NONE)
        self._only_next.append(NONE)
        self._count.append(0)
        return len(self._count) - 1

    def _next(self, state: int, token_id: int) -> int:
        if self._only_token[state] == token_id:
            return self._only_next[state]
        branches = self._branches.get(state)
        return NONE if branches is None else branches.get(token_id, NONE)

    def _connect(self, state: int, token_id: int, following: int) -> None:
        only = self._only_token[state]
        branches = self._branches.get(state)
        if branches is not None:
            branches[token_id] = following
        elif only in (NONE, token_id):
            self._only_token[state], self._only_next[state] = token_id, following
        else:
            self._branches[state] = {only: self._only_next[state], token_id: following}
            self._only_token[state] = NONE


Continuation = tuple[int, float, int]
"""A token, its share of the continuations, and the number of places counted."""


class CorpusMatch:
    """The longest end of a text that occurs in `index`, kept up to date token by token."""

    def __init__(self, index: SuffixIndex) -> None:
        self.index = index
        self._span: Span | None = None
        self._num_seen = 0

    @property
    def length(self) -> int:
        """Tokens of the match; 0 without one."""
        return 0 if self._span is None else self._span.length

    def restart(self) -> None:
        """Another text begins."""
        self._span, self._num_seen = None, 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """The text has grown to `token_ids`."""
        num_new = len(token_ids) - self._num_seen
        self._num_seen = len(token_ids)
        if num_new > LONGEST_MATCH // 4:  # one search takes less time than a step for each
            self._span = self.index.longest_end(token_ids[-LONGEST_MATCH:])
            return
        for end in range(len(token_ids) - num_new + 1, len(token_ids) + 1):
            self._span = self._longer(token_ids[end - 1]) or self._found_anew(token_ids, end)

    def _longer(self, token_id: int) -> Span | None:
        """The match with one more token behind it."""
        span = self._span
        return None if span is None or span.length >= LONGEST_MATCH else self.index.narrowed(span, token_id)

    def _found_anew(self, token_ids: Sequence[int], end: int) -> Span | None:
        """The match of the first `end` tokens, at most as long as before; one of full length restarts from half."""
        most = LONGEST_MATCH // 2 if self.length == LONGEST_MATCH else max(self.length, 1)
        return self.index.longest_end(token_ids[max(end - most, 0) : end], most)

    def continued(self, most: int) -> Iterator[Continuation]:
        """Up to `most` tokens, each the most frequent one after those before it; searched for as they are asked for."""
        index, span = self.index, self._span
        for count in range(most):
            if span is None:
                return
            places = span.high - span.low
            if places == 1 or span.length >= DEPTH:
                yield from ((token_id, 1.0, 1) for token_id in index.copied(span, most - count))
                return
            token_id, share = index.next_token(span)
            if token_id == END_OF_TEXT:
                return
            yield token_id, share, places
            span = index.narrowed(span, token_id)


_GROWTH = 4  # most tokens drafted per token of the match; longer drafts are rarely right
_NEARER = 2  # bonus in tokens for a match in the text: a corpus may be about something else


class SuffixDrafter(Drafter):
    """Continues the text from its own earlier tokens, `corpora`, `answers` of this process and `common` texts.

    At most `max_indexed` tokens of the text are indexed, the latest ones.
    """

    name = "suffix"
    is_free = True

    def __init__(
        self,
        max_indexed: int = 1 << 16,
        corpora: Sequence[SuffixIndex] = (),
        answers: AnswerIndex | None = None,
        common: CommonTexts | None = None,
    ) -> None:
        self._max_indexed = max_indexed
        self._text = FollowedText()
        self._automaton = SuffixAutomaton()
        self._lasting, self._answers, self.common = corpora, answers or AnswerIndex(), common
        self._corpora: list[CorpusMatch] = []
        self._search()

    def another(self, sequence: int) -> Drafter | None:
        """It searches the same texts."""
        return SuffixDrafter(self._max_indexed, self._lasting, self._answers, self.common)

    def learn(self, answer_ids: TokenIds) -> None:
        """An answer [n] is complete; later texts may draft from it."""
        self._answers.add(answer_ids)

    def begin(self, prompt_ids: TokenIds) -> None:
        """An empty prompt also clears the answers of this process."""
        self._text.begin(prompt_ids)
        if not prompt_ids.size:
            self._clear()
            self._answers.clear()
        self._search()

    def _search(self) -> None:
        """Search all other texts that there are by now."""
        found = (*self._lasting, self._answers.index, self.common.index if self.common else None)
        self._corpora = [CorpusMatch(index) for index in found if index is not None]

    def draft(self, request: DraftRequest) -> Draft:
        """A copy of what followed the longest match, at most `_GROWTH` times as long as the match."""
        self._index(request.token_ids)
        length = self._automaton.match[1]
        if self._corpora:
            for corpus in self._corpora:
                corpus.follow(self._text.ids)
            longest = max(self._corpora, key=lambda corpus: corpus.length)
            if longest.length > (length + _NEARER if length else 0):
                most = min(_GROWTH * longest.length, request.max_tokens)
                return looked_up(request, _copied_from(longest, most), most)
        return looked_up(request, self._copied(), _GROWTH * length) if length else EMPTY_DRAFT

    def _copied(self) -> Iterator[tuple[int, Evidence]]:
        """From the text itself."""
        state, length = self._automaton.match
        while state != ROOT:
            best, total = self._automaton.best_continuation(state)
            if best is None:
                return
            token_id, state, count = best
            yield token_id, _evidence(length, count, total, 0.0)
            length += 1

    @property
    def bytes_used(self) -> int:
        corpora_bytes = sum(corpus.index.bytes_used for corpus in self._corpora)
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


def _copied_from(corpus: CorpusMatch, most: int) -> Iterator[tuple[int, Evidence]]:
    for length, (token_id, share, places) in enumerate(corpus.continued(most), corpus.length):
        yield token_id, _evidence(length, share * places, places, -1.0)


def _evidence(match_length: int, count: float, total: int, origin: float) -> Evidence:
    """Scores of a continuation: the length of the match, its share of all continuations, their number, and `origin`.

    `origin`: 0 in the text itself, -1 in the corpus, which may be about something else.
    """
    share = (count + 0.5) / (total + 1.0)
    known = math.log2(match_length) / 2.0 - 1.0, math.log(share / (1.0 - share)) / 2.0, math.log2(total) / 4.0
    return (*known, origin)

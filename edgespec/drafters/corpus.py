"""Finds the end of a growing text in a corpus, and the tokens that most often follow there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.corpus.index import DEPTH, END_OF_TEXT, LONGEST_MATCH, Span, SuffixIndex

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

    @property
    def bytes_used(self) -> int:
        return self.index.bytes_used

    def restart(self) -> None:
        """Another text begins."""
        self._span, self._num_seen = None, 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """The text has grown to `token_ids`."""
        num_new = len(token_ids) - self._num_seen
        self._num_seen = len(token_ids)
        if num_new > LONGEST_MATCH:
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

"""A suffix array of a constant text: finds all positions of a token string.

Positions are sorted by the `DEPTH` tokens that begin at each (Manber & Myers 1993, prefix doubling), so the positions
of one string are a contiguous span. Extending a string by a token narrows the span with two binary searches. It takes 8
bytes per token; a suffix automaton takes about 100.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.types import TokenIds

DEPTH = 64  # number of tokens by which positions are sorted
LONGEST_MATCH = 32  # tokens; the rest of DEPTH is for drafting
END_OF_TEXT = -1  # follows each text, so that no match or copy crosses the border of two texts
_SAMPLED = 32  # positions sampled to estimate the most frequent next token
BYTES_PER_TOKEN = 8
_PACKED_BITS = 63  # of the int64 into which key and position are packed


class Span(NamedTuple):
    """Entries low..high - 1 of the suffix array: positions at which the same `length` tokens begin."""

    low: int
    high: int
    length: int


class SuffixIndex:
    """Index of `token_ids` [n], with END_OF_TEXT after each text; `order` [n] as `sorted_places` returns it."""

    def __init__(self, token_ids: TokenIds, order: NDArray[np.int32]) -> None:
        # In one block, for which numpy asks for huge pages where it is large: places are looked up here and there.
        both = np.full((2, token_ids.size + DEPTH + 1), END_OF_TEXT, np.int32)
        both[:, : token_ids.size] = token_ids, order
        self._ids, self._order = memoryview(both[0].data), memoryview(both[1, : token_ids.size].data)
        counts = np.bincount(token_ids + 1) if token_ids.size else np.zeros(1, np.int64)
        self._begins = np.concatenate(([0], np.cumsum(counts))).astype(np.int32).data  # by token id + 1

    @classmethod
    def of(cls, token_ids: TokenIds) -> Self:
        """Build the index of `token_ids` [n]; takes about one second for 10^6 tokens."""
        return cls(token_ids, sorted_places(token_ids))

    @property
    def num_tokens(self) -> int:
        return len(self._order)

    @property
    def bytes_used(self) -> int:
        return self._ids.nbytes + self._order.nbytes + self._begins.nbytes

    def narrowed(self, span: Span, token_id: int) -> Span | None:
        """The part of `span` in which `token_id` follows; None if there is none or the string is DEPTH tokens long."""
        low, high, length = span
        if length >= DEPTH:
            return None
        ids = self._ids
        low = bisect_left(self._order, token_id, low, high, key=lambda place: ids[place + length])
        if low == high or ids[self._order[low] + length] != token_id:
            return None
        high = bisect_right(self._order, token_id, low, high, key=lambda place: ids[place + length])
        return Span(low, high, length + 1)

    def find(self, token_ids: Sequence[int]) -> Span | None:
        """The span of all positions of `token_ids` (at least one); None if they do not occur."""
        first = token_ids[0] + 1
        if first + 1 >= len(self._begins) or self._begins[first] == self._begins[first + 1]:
            return None
        span: Span | None = Span(self._begins[first], self._begins[first + 1], 1)
        for token_id in token_ids[1:]:
            if span is None:
                return None
            span = self.narrowed(span, token_id)
        return span

    def longest_end(self, token_ids: Sequence[int], most: int = LONGEST_MATCH) -> Span | None:
        """The span of the longest suffix of `token_ids` that occurs, up to `most` tokens; None if there is none."""
        most = min(most, len(token_ids))
        best, step = None, 1
        length = 0
        while length < most:  # galloping search: the step doubles while the suffix occurs, then halves
            tried = min(length + step, most)
            found = self.find(token_ids[len(token_ids) - tried :])
            if found is not None:
                best, length = found, tried
                step *= 2
            elif step == 1:
                break
            else:
                most = tried - 1
                step = max((most - length + 1) // 2, 1)
        return best

    def next_token(self, span: Span) -> tuple[int, float]:
        """(most frequent next token of `span`, its share), estimated on an evenly spread sample of positions."""
        low, high, length = span
        ids, order = self._ids, self._order
        count = high - low
        step = max(count / _SAMPLED, 1.0)
        best = current = ids[order[low] + length]
        best_run = run = 0
        for number in range(min(count, _SAMPLED)):
            token_id = ids[order[low + int(number * step)] + length]
            if token_id != current:
                current, run = token_id, 0
            run += 1
            if run > best_run:
                best, best_run = current, run
        return best, best_run / min(count, _SAMPLED)

    def copied(self, span: Span, count: int) -> list[int]:
        """Up to `count` tokens that follow the first position of `span`, until the end of that text."""
        begin = self._order[span.low] + span.length
        found = self._ids[begin : begin + count].tolist()
        return found[: found.index(END_OF_TEXT)] if END_OF_TEXT in found else found


class AnswerIndex:
    """Answers of this process to draft from: the index of the latest `most_tokens` of them, made anew with each one."""

    def __init__(self, most_tokens: int = 1 << 15) -> None:
        self.index: SuffixIndex | None = None
        self._most, self._answers = most_tokens, list[TokenIds]()

    def add(self, answer_ids: TokenIds) -> None:
        self._answers.append(answer_ids[-self._most :])
        while sum(ids.size for ids in self._answers) > self._most:
            del self._answers[0]
        self.index = SuffixIndex.of(joined(self._answers))

    def clear(self) -> None:
        self.index, self._answers = None, []


def joined(documents: Iterable[TokenIds]) -> TokenIds:
    """All documents as one array [n], each followed by END_OF_TEXT."""
    end = np.array([END_OF_TEXT], np.int32)
    return np.concatenate([part for ids in documents for part in (ids, end)] or [np.empty(0, np.int32)])


def sorted_places(token_ids: TokenIds) -> NDArray[np.int32]:
    """The positions [n] of `token_ids` [n], sorted by the DEPTH tokens that begin at each."""
    num_tokens = token_ids.size
    if not num_tokens:
        return np.empty(0, np.int32)
    order, rank = _ranked(token_ids.astype(np.int64) - END_OF_TEXT)
    reach = 1
    while reach < DEPTH and rank[order[-1]] < num_tokens:
        key = rank * (num_tokens + 1)
        key[: num_tokens - reach] += rank[reach:]  # 0 after the end, which is below all ranks
        order, rank = _ranked(key)
        reach *= 2
    return order.astype(np.int32)


def _ranked(key: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(positions sorted by `key` [n], dense rank of each position's key from 1); no key exceeds (n + 1)^2."""
    bits = int(key.size).bit_length()
    if 3 * bits < _PACKED_BITS:  # pack key and position into one int64: sort is several times faster than argsort
        in_order = key << bits  # then in place, for the sake of memory
        in_order |= np.arange(key.size)
        in_order.sort()
        order = in_order & ((1 << bits) - 1)
        in_order >>= bits
    else:
        order = np.argsort(key)
        in_order = key[order]
    steps = np.empty(key.size, np.int64)
    steps[0] = 1
    np.not_equal(in_order[1:], in_order[:-1], out=steps[1:], casting="unsafe")
    rank = np.empty(key.size, np.int64)
    rank[order] = np.cumsum(steps)
    return order, rank

"""The n-gram cache: the tokens that most often followed the latest ones, in this text and in earlier answers.

A draft is made token by token: the token that most often followed the longest known n-gram. Counts of this text take
precedence over those of earlier ones. N-grams are looked up with `keys_of` the latest tokens, hashes of 42 bits
(multiplied and folded, as Fibonacci hashing does): two that share a key cost a wrong draft now and then.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.ngram import FollowedText, looked_up
from edgespec.errors import CapabilityError
from edgespec.types import Draft, Evidence, TokenIds

SIZES = (5, 3, 2, 1)  # of n-grams, in tokens, the longest first
_IS_SIZE = tuple(size in SIZES for size in range(1, SIZES[0] + 1))
_TOKEN_BITS = 22
MAX_VOCABULARY = 1 << _TOKEN_BITS
_MASK, _MULTIPLIER, _SHIFT = (1 << 64) - 1, 0x9E3779B97F4A7C15, 29
_SLOT_BITS = 16
_SLOT_SHIFT = 64 - _TOKEN_BITS - _SLOT_BITS
_BYTES_PER_NGRAM = 230  # one dictionary entry with its key and value, measured on CPython 3.11


Following = tuple[int, int, int]
"""The most frequent token after an n-gram, how often it followed, and how often any token did."""


def keys_of(latest: Sequence[int]) -> list[int]:
    """Keys of the n-grams that `latest` ends with, by SIZES as far as there are so many tokens, the longest first."""
    keys = []
    state = 0
    for token_id, is_size in zip(reversed(latest), _IS_SIZE, strict=False):
        state = ((state ^ (token_id + 1)) * _MULTIPLIER) & _MASK
        state ^= state >> _SHIFT
        if is_size:
            keys.append(state >> _TOKEN_BITS)
    keys.reverse()
    return keys


class GrowingCounts:
    """Counts of one text as it grows; beyond `max_tokens` the older half is dropped.

    A token that follows an n-gram more often than another replaces it (Boyer & Moore's majority vote), so each n-gram
    takes the same memory.
    """

    def __init__(self, max_tokens: int = 1 << 15) -> None:
        self._most = max_tokens // 2
        self._num_tokens = 0  # in `_young`
        self._young: dict[int, Following] = {}
        self._old: dict[int, Following] = {}

    @property
    def bytes_used(self) -> int:
        return (len(self._young) + len(self._old)) * _BYTES_PER_NGRAM

    def clear(self) -> None:
        self._num_tokens, self._young, self._old = 0, {}, {}

    def add(self, token_ids: Sequence[int], start: int) -> None:
        """Count the tokens from place `start` on, each behind the n-grams before it."""
        for place in range(start, len(token_ids)):
            if self._num_tokens >= self._most:
                self._num_tokens, self._young, self._old = 0, {}, self._young
            self._num_tokens += 1
            for key in keys_of(token_ids[max(place - SIZES[0], 0) : place]):
                self._count(key, token_ids[place])

    def get(self, key: int) -> Following | None:
        return self._young.get(key) or self._old.get(key)

    def _count(self, key: int, token_id: int) -> None:
        best, count, total = self._young.get(key) or self._old.get(key) or (token_id, 0, 0)
        if best == token_id:
            self._young[key] = token_id, count + 1, total + 1
        elif count > 1:
            self._young[key] = best, count - 1, total + 1
        else:
            self._young[key] = token_id, 1, total + 1


class CountTable:
    """Counts of many texts, in sorted arrays: 20 bytes an n-gram, found in a slot by the upper bits of its key."""

    def __init__(self, texts: Iterable[TokenIds]) -> None:
        ids, text_of = _joined(texts)
        entries = np.sort(np.concatenate([_entries(ids, text_of, size) for size in SIZES]))
        begins = _first_of_runs(entries)
        counts = np.diff(begins, append=entries.size)
        keys = entries[begins] >> np.uint64(_TOKEN_BITS)
        tokens = entries[begins] & np.uint64(MAX_VOCABULARY - 1)
        groups = _first_of_runs(keys)
        if not groups.size:
            best = totals = counts
        else:
            best = np.maximum.reduceat((counts.astype(np.uint64) << np.uint64(_TOKEN_BITS)) | tokens, groups)
            totals = np.add.reduceat(counts, groups)
        keys = keys[groups]
        self._keys = np.ascontiguousarray(keys).data
        self._best = np.ascontiguousarray(best.astype(np.int64)).data
        self._totals = np.ascontiguousarray(totals.astype(np.int32)).data
        slots = np.searchsorted(keys, np.arange((1 << _SLOT_BITS) + 1, dtype=np.uint64) << np.uint64(_SLOT_SHIFT))
        self._slots = slots.astype(np.int32).data

    @property
    def bytes_used(self) -> int:
        return sum(part.nbytes for part in (self._keys, self._best, self._totals, self._slots))

    def get(self, key: int) -> Following | None:
        slot = key >> _SLOT_SHIFT
        place = bisect_left(self._keys, key, self._slots[slot], self._slots[slot + 1])
        if place == self._slots[slot + 1] or self._keys[place] != key:
            return None
        best = self._best[place]
        return best & MAX_VOCABULARY - 1, best >> _TOKEN_BITS, self._totals[place]


def _joined(texts: Iterable[TokenIds]) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """(the ids [n] of all texts, which text each belongs to [n])."""
    parts = list(texts)
    ids = np.concatenate([np.empty(0, np.int32), *parts]).astype(np.uint64)
    return ids, np.repeat(np.arange(len(parts), dtype=np.int32), [part.size for part in parts])


def _entries(ids: NDArray[np.uint64], text_of: NDArray[np.int32], size: int) -> NDArray[np.uint64]:
    """One number for each n-gram of `size` and the token behind it: its key and, in the lower bits, that token."""
    count = max(ids.size - size, 0)
    keys = np.zeros(count, np.uint64)
    for place in reversed(range(size)):
        keys = (keys ^ (ids[place : place + count] + np.uint64(1))) * np.uint64(_MULTIPLIER)
        keys ^= keys >> np.uint64(_SHIFT)
    entries = (keys >> np.uint64(_TOKEN_BITS) << np.uint64(_TOKEN_BITS)) | ids[size:]
    within: NDArray[np.uint64] = entries[text_of[:count] == text_of[size:]]
    return within


def _first_of_runs(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where each run of equal values begins, in sorted `values` [n]."""
    begins = np.ones(values.size, np.bool_)
    np.not_equal(values[1:], values[:-1], out=begins[1:])
    return np.flatnonzero(begins)


_LEAST_REACH = 0.2  # the probability of all tokens so far, below which a draft that nobody else ends is over


class CacheDrafter(Drafter):
    """Drafts from n-grams of the text, of this process's answers (`learn`) and of `earlier` ones [tokens of each]."""

    name = "cache"
    is_free = True

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
        return looked_up(request, self._continued(0.0 if request.should_continue else _LEAST_REACH))

    def _continued(self, least_reach: float) -> Iterator[tuple[int, Evidence]]:
        """Tokens, until the probability of all of them falls below `least_reach`."""
        latest, reach = self._text.ids[-SIZES[0] :], 1.0
        while reach >= least_reach and (found := self._following(latest)) is not None:
            size, (token_id, count, total), origin = found
            share = (count + 0.5) / (total + 1.0)
            yield token_id, (size / 3.0 - 1.0, math.log(share / (1.0 - share)) / 2.0, origin)
            reach *= share
            latest = [*latest[-SIZES[0] + 1 :], token_id]

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

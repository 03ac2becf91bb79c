"""The tokens in a cache, and the passes that read them (see `prompt_passes`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgespec.engines.prompt_passes import PromptBlocks
from edgespec.types import TokenIds


class CachedText(NamedTuple):
    """Cached tokens [n], and for each of them where its pass ended [n], as `PromptBlocks.ends` gives it."""

    token_ids: TokenIds
    ends: TokenIds

    def shared_length(self, wanted_ids: TokenIds, blocks: PromptBlocks | None) -> int:
        """How many tokens, at most n - 1, of a prompt [n] are cached, and were read in the passes that it wants."""
        limit = min(self.token_ids.size, wanted_ids.size - 1)
        shared = _equal(self.token_ids[:limit], wanted_ids[:limit])
        if blocks is None:
            return shared
        return whole_passes(self.ends, _equal(self.ends[:shared], blocks.ends(wanted_ids)[:shared]))

    def begins_with(self, other: CachedText) -> bool:
        """Whether it holds all that `other` holds."""
        size = other.token_ids.size
        return all(np.array_equal(own[:size], its) for own, its in zip(self, other, strict=True))


def whole_passes(ends: TokenIds, length: int) -> int:
    """The longest length up to `length` that does not end within a block."""
    if length and ends[length - 1] > length:
        return int(ends[:length].searchsorted(ends[length - 1]))
    return length


class GrowingText:
    """The text of a cache, of at most `capacity` tokens, which grows and is cut; the arrays that it gives are views."""

    def __init__(self, capacity: int) -> None:
        # one more than the cache holds: the pending token comes after the cached ones
        self._ids = np.zeros(capacity + 1, np.int32)
        self._ends = np.zeros(capacity + 1, np.int32)
        self.length = 0

    @property
    def text(self) -> CachedText:
        """All of it."""
        return CachedText(self._ids[: self.length], self._ends[: self.length])

    def with_pending(self, token_id: int) -> TokenIds:
        """The tokens and `token_id` after them [length + 1], which the next call may change."""
        self._ids[self.length] = token_id
        return self._ids[: self.length + 1]

    def append(self, token_ids: TokenIds, ends: TokenIds | None = None) -> None:
        """Add tokens [n] and where their passes ended [n]; None: they are of the width class."""
        start, self.length = self.length, self.length + int(token_ids.size)
        self._ids[start : self.length] = token_ids
        self._ends[start : self.length] = np.arange(start + 1, self.length + 1) if ends is None else ends

    def latest_in_class(self, most: int) -> int:
        """How many of the last tokens, at most `most`, were read in passes of the width class."""
        places = np.arange(max(self.length - most, 0), self.length)
        behind = np.where(places, self._ends[places - 1], 0)  # where the pass of the token before ended
        others = np.flatnonzero((behind != places) | (self._ends[places] != places + 1))
        return places.size - (int(others[-1]) + 1 if others.size else 0)


def _equal(held: TokenIds, wanted: TokenIds) -> int:
    """How many places at the beginning of both [n] are equal."""
    differs = np.flatnonzero(held != wanted)
    return int(differs[0]) if differs.size else held.size

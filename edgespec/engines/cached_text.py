"""The tokens in a cache, and the passes that read them.

A prompt is cut into passes that are mostly as wide as they may be (`borders`). In reproducible mode the width of its
pass gives a token's keys and values their bits. In a wide class all widths give the same. Where the class ends at three
rows, as with llama.cpp's Q4_K kernels, a prompt that was read in wide passes has other bits than one that was decoded,
but the same ones each time if it is cut in the same places. So there its length alone decides (`block_ends`): it is
read in blocks from its beginning, and its last token by itself. What was decoded is read again as a part of the next
prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from edgespec.engines.base import Engine
from edgespec.engines.features import PROMPT_FEATURES
from edgespec.engines.proof import EVERY_WIDTH_TO
from edgespec.types import TokenIds


class CachedText(NamedTuple):
    """Cached tokens [n], and for each of them where its pass ended [n], as `block_ends` gives it."""

    token_ids: TokenIds
    ends: TokenIds

    def shared_length(self, wanted_ids: TokenIds, block: int) -> int:
        """How many tokens, at most n - 1, of a prompt [n] are cached, and were read in the passes that it wants.

        `block`: as `EngineFacts.prompt_block`; 0: in any passes.
        """
        limit = min(self.token_ids.size, wanted_ids.size - 1)
        shared = _equal(self.token_ids[:limit], wanted_ids[:limit])
        if not block:
            return shared
        wanted = block_ends(wanted_ids.size, block)
        return whole_passes(self.ends, _equal(self.ends[:shared], wanted[:shared]))

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


# Tokens at the end of a prompt, among them what opens an answer: the next prompt of a conversation may lack those.
PROMPT_END = 16


def borders(engine: Engine, num_tokens: int, most_with_states: int) -> list[int]:
    """Where passes over `num_tokens` tokens begin and end that are as wide as they may be.

    `most_with_states`: most rows of those that give hidden states of the last PROMPT_FEATURES tokens.
    """
    step = engine.widest_pass
    ends = [*range(0, num_tokens, step), num_tokens]
    last = ends[-1] - ends[-2] if num_tokens else 0
    if engine.facts.pinned_class and EVERY_WIDTH_TO < last < step:
        ends.insert(-1, ends[-2] + EVERY_WIDTH_TO)  # the widths between were not all tested
    late = num_tokens - PROMPT_FEATURES
    if step > most_with_states and late > 0:
        ends = [*(end for end in ends if end < late), late, num_tokens]
    if engine.facts.has_checkpoints and num_tokens > PROMPT_END:
        ends = sorted({*ends, num_tokens - PROMPT_END})
    return ends


def block_ends(num_tokens: int, block: int) -> TokenIds:
    """For each token of a prompt that is read in blocks, where its pass ends: i + 1 for one of the width class."""
    ends = np.arange(1, num_tokens + 1, dtype=np.int32)
    ends[:-1] = np.minimum(-(-ends[:-1] // block) * block, num_tokens - 1)  # without the last one
    return ends


def runs(ends: TokenIds, widest: int) -> Iterator[tuple[int, int]]:
    """Where passes over tokens [n] begin and end that have these `ends`, with at most `widest` rows of the class."""
    start = 0
    while start < ends.size:
        end = int(ends[start])
        if end == start + 1:
            while end < ends.size and end - start < widest and ends[end] == end + 1:
                end += 1
        yield start, end
        start = end

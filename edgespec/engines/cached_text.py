"""The tokens in a cache, and the passes that read them.

A prompt is cut into passes that are mostly as wide as they may be (`borders`). In reproducible mode the width of its
pass gives a token's keys and values their bits. In a wide class all widths give the same. Where the class ends at three
rows, as with llama.cpp's Q4_K kernels, a prompt that was read in wide passes has other bits than one that was decoded,
but the same ones each time if it is cut in the same places. So there the tokens of the prompt alone decide
(`PromptBlocks`): what the user wrote is read in blocks, from where it begins, and its last token by itself, so that a
prompt that comes again goes on from there. What the model answered in earlier turns is read in passes of the class, as
it was decoded; while a conversation goes on, it is still in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgespec.engines.base import Engine
from edgespec.engines.features import PROMPT_FEATURES
from edgespec.engines.proof import EVERY_WIDTH_TO
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


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The cuts of prompts into blocks of `size` tokens.

    `opening`: the tokens that open an answer in a conversation; `end_ids`: any of them ends it. An empty `opening`:
    answers cannot be told from the rest, and are read in blocks as well.
    """

    size: int
    opening: tuple[int, ...] = ()
    end_ids: frozenset[int] = frozenset()

    def ends(self, token_ids: TokenIds) -> TokenIds:
        """For each token of a prompt [n], where the pass that reads it ends [n]: i + 1 for one of the width class."""
        ends = np.arange(1, token_ids.size + 1, dtype=np.int32)
        for start, stop in self._given(token_ids):
            body = max(stop - 1, start)  # without the last token
            places = np.arange(start, body, dtype=np.int32)
            ends[start:body] = np.minimum(places + self.size - (places - start) % self.size, body)
        return ends

    def _given(self, token_ids: TokenIds) -> Iterator[tuple[int, int]]:
        """Where the parts of a prompt begin and end that were not answered by the model."""
        start = 0
        stops = np.flatnonzero(np.isin(token_ids, list(self.end_ids)))
        for answer in self._answers(token_ids):
            if answer < start:  # the opening stands within an answer
                continue
            yield start, answer
            later = stops.searchsorted(answer)
            start = int(stops[later]) if later < stops.size else token_ids.size
        yield start, token_ids.size

    def _answers(self, token_ids: TokenIds) -> list[int]:
        """Where answers begin."""
        size, last = len(self.opening), token_ids.size - len(self.opening) + 1
        if not size or last < 1:
            return []
        found = np.ones(last, np.bool_)
        for place, token_id in enumerate(self.opening):
            found &= token_ids[place : place + last] == token_id
        return [int(place) + size for place in np.flatnonzero(found)]


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

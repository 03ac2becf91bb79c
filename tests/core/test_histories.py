"""The work of a drafting round does not depend on the length of the history; counted in lines, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.corpus.index import SuffixIndex, joined
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.sampling.sampler import Sampler
from edgespec.types import TokenIds

SAMPLER = Sampler(Sampling(temperature=0), 32_000)
SHORT, LONG = 2_000, 40_000
ROUNDS = 150


def made_text(num_tokens: int, seed: int) -> TokenIds:
    """Zipf tokens [n] of which about half stand in stretches copied from earlier ones, as in an edited document."""
    rng = np.random.default_rng(seed)
    ids = (rng.zipf(1.25, num_tokens) % 32_000).astype(np.int32)
    place = 64
    while place < num_tokens:
        length = int(rng.integers(8, 64))
        source = int(rng.integers(0, place - 32))
        count = min(length, num_tokens - place, place - source)
        ids[place : place + count] = ids[source : source + count]
        place += count + length
    return ids


def with_corpus(size: int) -> Drafter:
    return SuffixDrafter(corpora=[SuffixIndex.of(joined([made_text(size, 1)]))])


MAKERS: dict[str, Callable[[int], Drafter]] = {
    "ngram": lambda size: NgramDrafter(),
    "suffix": lambda size: SuffixDrafter(),
    "suffix, corpus": with_corpus,
}


def lines_per_token(drafter: Drafter, history: int) -> float:
    """Lines of Python run per arriving and drafted token in rounds behind `history` tokens."""
    text = made_text(LONG + 4 * ROUNDS, 0)
    drafter.begin(text[:history])
    drafter.draft(DraftRequest(text[:history], 8, SAMPLER))  # which indexes the prompt
    counted = tokens = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        counted += event == "line"
        return count

    for end in range(history, history + 4 * ROUNDS, 4):
        request = DraftRequest(text[:end], 8, SAMPLER)
        sys.settrace(count)
        try:
            draft = drafter.draft(request)
        finally:
            sys.settrace(None)
        tokens += 4 + draft.num_tokens
    return counted / tokens


@pytest.mark.parametrize("name", MAKERS)
def test_work_per_token_does_not_grow_with_the_history(name: str) -> None:
    short, long = (lines_per_token(MAKERS[name](size), size) for size in (SHORT, LONG))
    assert long < 1.6 * short, (short, long)

"""The part of a text that a draft model reads: all of it, or the latest tokens behind the first."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec import Sampling
from edgespec.control.base import FixedLength
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.decode import autoregressive, speculative
from edgespec.generation.run_state import Run
from edgespec.sampling.acceptance import coupled
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import TokenIds
from lossless import PLAIN, VOCABULARY
from table_engine import TableEngine

TEXT = np.random.default_rng(5).integers(0, VOCABULARY, 2000).astype(np.int32)


def engine(context: int = 4096) -> TableEngine:
    return TableEngine.random(VOCABULARY, seed=2, context_length=context)


def draft(drafter: ModelDrafter | TreeDrafter, token_ids: TokenIds) -> None:
    drafter.draft(DraftRequest(token_ids, 4, Sampler(Sampling(temperature=0.0), VOCABULARY)))


def cached(drafter: ModelDrafter) -> list[int]:
    return drafter.cache.token_ids.tolist()


def test_what_can_be_paid_is_read_whole() -> None:
    drafter = ModelDrafter(engine())
    assert drafter.reading(TEXT[:1000], 1000, 500) == 1000
    assert not drafter.reads_part
    draft(drafter, TEXT[:1000])
    assert cached(drafter)[:1000] == TEXT[:1000].tolist()
    assert drafter.reading(TEXT[:1010], 10, 0) <= 10


def test_of_a_long_text_the_latest_part_is_read_and_the_rest_when_it_can_be_paid() -> None:
    drafter = ModelDrafter(engine())
    assert drafter.reading(TEXT[:1000], 999, 300) == 301
    assert not drafter.reads_part  # it was chosen, not read
    draft(drafter, TEXT[:1000])
    assert drafter.reads_part
    assert cached(drafter)[:301] == [int(TEXT[0]), *TEXT[700:1000].tolist()]
    assert drafter.reading(TEXT[:1008], 999, 300) <= 8  # the window in use grows with the text
    draft(drafter, TEXT[:1008])
    assert drafter.reading(TEXT[:1008], 1007, 300) == 1007  # all but the first token
    draft(drafter, TEXT[:1008])
    assert cached(drafter)[:1008] == TEXT[:1008].tolist() and not drafter.reads_part


def test_a_small_part_is_not_worth_trying() -> None:
    drafter = ModelDrafter(engine())
    assert drafter.reading(TEXT[:1000], 500, 20) == 1000
    assert drafter.num_uncached(TEXT[:1000]) == 1000


def test_the_next_prompt_of_a_conversation_goes_on_with_the_part_that_was_read() -> None:
    drafter = ModelDrafter(engine())
    drafter.begin(TEXT[:1000])
    drafter.reading(TEXT[:1000], 0, 200)
    draft(drafter, TEXT[:1000])
    for _ in range(2):  # also by the tree that shares it
        drafter.begin(TEXT[:1100])
    assert drafter.num_uncached(TEXT[:1100]) == 1099  # of the whole text, which is what it reads if nobody limits it
    assert drafter.reading(TEXT[:1100], 500, 150) in range(95, 101)
    drafter.begin(TEXT[500:1500])
    assert drafter.reading(TEXT[500:1500], 500, 150) == 151  # another conversation


@pytest.mark.parametrize("context", [64, 512])
def test_a_text_beyond_the_context_counts_as_what_is_read_of_it(context: int) -> None:
    """However long it is, a window reads half of a context at most."""
    drafter = ModelDrafter(engine(context))
    half = context // 2
    assert drafter.reading(TEXT, half - 1, 0) == half
    assert drafter.reading(TEXT, half, 0) == half + 1
    draft(drafter, TEXT)
    assert cached(drafter)[: half + 1] == [int(TEXT[0]), *TEXT[-half:].tolist()]


@pytest.mark.parametrize("kind", ["model", "tree", "hierarchical"])
@pytest.mark.parametrize("settings", [PLAIN, Sampling(temperature=0.0)])
def test_the_text_does_not_depend_on_the_part(kind: str, settings: Sampling) -> None:
    """Windows come, grow and go in the middle of an answer."""
    target = TableEngine.random(VOCABULARY, seed=1, context_length=4096)
    small, medium = (ModelDrafter(target.related(sigma=sigma)) for sigma in (1.0, 0.5))

    class Limiting(FixedLength):
        def proposing(self, request: DraftRequest):
            drafter.reading(request.token_ids, 60 * (request.token_ids.size % 7), 128 + request.token_ids.size % 3)
            return super().proposing(request)

    makers = {
        "model": lambda: medium,
        "tree": lambda: TreeDrafter(medium),
        "hierarchical": lambda: HierarchicalDrafter(small, target.related(sigma=0.5)),
    }
    drafter = makers[kind]()
    runs = [
        Run(CachedSequence(target), TEXT[:200], Sampler(settings, VOCABULARY), StopRules(frozenset(), (), 300))
        for _ in range(2)
    ]
    plain = [event.token_id for event in autoregressive(runs[0])]
    assert [event.token_id for event in speculative(runs[1], Limiting(drafter, 6), coupled)] == plain

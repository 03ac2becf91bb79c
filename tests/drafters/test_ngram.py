"""Prompt lookup."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.ngram import FollowedText, NgramDrafter
from edgespec.sampling.sampler import Sampler
from edgespec.types import TokenIds, Verdict

SAMPLER = Sampler(Sampling(), 100)


def array(*token_ids: int) -> TokenIds:
    return np.array(token_ids, np.int32)


def request(ids: list[int], most: int = 4) -> DraftRequest:
    return DraftRequest(np.array(ids, np.int32), most, SAMPLER)


def slow_lookup(ids: list[int], most: int, sizes: range) -> list[int]:
    """Reference implementation: search the whole history backwards for the longest match."""
    for size in sizes:
        for place in range(len(ids) - 1, size - 1, -1):
            if ids[place - size : place] == ids[-size:]:
                text = list(ids)
                while len(text) < len(ids) + most:
                    text.append(text[place + len(text) - len(ids)])
                return text[len(ids) :]
    return []


def test_it_finds_what_an_exhaustive_search_finds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, 4, int(rng.integers(1, 60))).tolist()
        drafter = NgramDrafter()
        drafter.begin(np.array(ids[: len(ids) // 2], np.int32))
        found = drafter.draft(request(ids, 6))
        assert found.token_ids.tolist() == slow_lookup(ids, 6, range(4, 1, -1))


def test_a_copy_that_reaches_the_end_repeats_its_period() -> None:
    drafter = NgramDrafter()
    drafter.begin(np.array([1, 2, 3, 1, 2, 3], np.int32))
    assert drafter.draft(request([1, 2, 3, 1, 2, 3], 7)).token_ids.tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_a_refused_place_is_not_proposed_from_again() -> None:
    ids = [1, 2, 3, 4, 1, 2, 9, 1, 2]
    drafter = NgramDrafter()
    drafter.begin(np.array(ids, np.int32))
    first = drafter.draft(request(ids, 2))
    assert first.token_ids.tolist() == [9, 1]
    drafter.observe(first, Verdict((), 5))
    assert drafter.draft(request(ids, 2)).num_tokens == 0
    assert drafter.draft(request([*ids, 3, 4], 2)).token_ids.tolist() == [1, 2]


def test_the_evidence_of_a_token_grows_with_its_match() -> None:
    for ids, size in (([1, 2, 3] * 4, 4), ([9, 1, 2, 3, 8, 1, 2, 3], 3), ([9, 1, 2, 8, 7, 1, 2], 2)):
        drafter = NgramDrafter()
        drafter.begin(np.array(ids, np.int32))
        draft = drafter.draft(request(ids))
        assert draft.evidence == tuple((math.log2(size + count) - 2.0,) for count in range(draft.num_tokens))
    assert drafter.is_free


def test_a_new_generation_forgets_the_old_text_unless_it_goes_on_from_it() -> None:
    drafter = NgramDrafter()
    drafter.begin(np.array([1, 2, 3, 4], np.int32))
    drafter.begin(np.array([1, 2, 3, 4, 5, 1, 2], np.int32))
    assert drafter.draft(request([1, 2, 3, 4, 5, 1, 2], 1)).token_ids.tolist() == [3]
    drafter.begin(np.array([7, 1, 2], np.int32))
    assert drafter.draft(request([7, 1, 2])).num_tokens == 0


def test_a_long_history_takes_bounded_memory_and_its_latest_half_is_found() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 20_000).tolist()
    drafter = NgramDrafter(max_indexed=2000)
    most = 0
    for end in range(100, len(ids), 100):
        drafter.draft(request(ids[:end]))
        most = max(most, len(drafter._places))
    assert most <= 3 * 2000
    end = len(ids) - 100
    for back in (4, 300, 900):
        again = [*ids[:end], *ids[end - back : end - back + 3]]
        assert drafter.draft(request(again, 1)).token_ids.tolist() == [ids[end - back + 3]]
        drafter.begin(np.array(ids[:end], np.int32))


@pytest.mark.parametrize(
    ("later", "start"),
    [
        (array(1, 2, 3, 4), 3),
        (array(1, 2, 3), 3),
        (array(1, 2), 0),  # a turn was taken back
        (array(1, 9, 3, 4), 0),
        (array(7), 0),
    ],
)
def test_a_prompt_that_continues_the_last_text_is_new_from_its_end_on(later: TokenIds, start: int) -> None:
    text = FollowedText()
    assert [text.grow(array(1, 2)), text.grow(array(1, 2, 3))] == [0, 2]
    text.begin(later)
    assert text.grow(later) == start
    assert text.ids == later.tolist()


def test_an_empty_prompt_frees_the_text_at_once() -> None:
    text = FollowedText()
    text.grow(array(1, 2))
    text.begin(array())
    assert text.bytes_used == 0
    assert text.grow(array(1, 2)) == 0

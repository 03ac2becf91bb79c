"""What is learnt of drafters by kind of text, and drafts that only the text judges."""

from __future__ import annotations

import numpy as np

from edgespec.config.options import Sampling
from edgespec.control.choice import Kinds, UnusedDrafts, kind_of
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.ngram import NgramDrafter
from edgespec.sampling import Sampler
from edgespec.types import Draft


def test_a_long_prompt_is_a_kind_of_its_own() -> None:
    request = DraftRequest(np.arange(300, dtype=np.int32), 4, Sampler(Sampling(temperature=0.0), 5000))
    assert [kind_of(request, tokens) for tokens in (0, 255, 256)] == ["greedy", "greedy", "greedy long"]
    kinds = Kinds({"ngram": NgramDrafter()})
    assert kinds.of("greedy") is kinds.of("greedy") is not kinds.of("greedy long")


def add(drafts: UnusedDrafts, token_ids: list[int], start: int) -> None:
    drafts.add("ngram", start, Draft.chain(token_ids, evidence=[(2.0,)] * len(token_ids)))


def resolved(drafts: UnusedDrafts, text: list[int]) -> list[tuple[list[int], int]]:
    return [(draft.token_ids.tolist(), agreed) for _, draft, agreed in drafts.resolved(np.array(text, np.int32), ())]


def test_a_draft_is_judged_at_its_first_difference() -> None:
    drafts = UnusedDrafts()
    add(drafts, [5, 6, 7, 8], start=3)
    assert resolved(drafts, [1, 2, 3]) == []
    assert resolved(drafts, [1, 2, 3, 5]) == []
    assert resolved(drafts, [1, 2, 3, 5, 6, 9]) == [([5, 6, 7, 8], 2)]
    assert resolved(drafts, [1, 2, 3, 5, 6, 9, 8]) == []


def test_a_draft_that_agrees_waits_for_its_last_token() -> None:
    drafts = UnusedDrafts()
    add(drafts, [5, 6], start=1)
    assert resolved(drafts, [1, 5]) == []
    assert resolved(drafts, [1, 5, 6, 7]) == [([5, 6], 2)]


def test_several_drafts_wait_at_once_and_each_is_told_once() -> None:
    drafts = UnusedDrafts()
    for token_ids, start in (([5, 6, 7], 1), ([6, 9], 2), ([4], 1)):
        add(drafts, token_ids, start)
    assert resolved(drafts, [1, 5]) == [([4], 0)]
    assert sorted(resolved(drafts, [1, 5, 6, 7, 8])) == [([5, 6, 7], 3), ([6, 9], 1)]


def test_an_empty_draft_is_no_draft_and_clearing_forgets() -> None:
    drafts = UnusedDrafts()
    drafts.add("ngram", 1, Draft.chain([]))
    add(drafts, [5], start=1)
    drafts.clear()
    assert resolved(drafts, [1, 5]) == []


def test_only_so_many_are_kept_waiting() -> None:
    drafts = UnusedDrafts()
    for start in range(200):
        add(drafts, [1] * 400, start)
    assert len(resolved(drafts, [2] * 500)) == 64

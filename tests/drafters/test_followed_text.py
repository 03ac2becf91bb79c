"""Lookup drafters read each token of a text once, however many answers continue it."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.drafters.ngram import FollowedText
from edgespec.types import TokenIds


def ids(*token_ids: int) -> TokenIds:
    return np.array(token_ids, np.int32)


@pytest.mark.parametrize(
    ("later", "start"),
    [
        (ids(1, 2, 3, 4), 3),
        (ids(1, 2, 3), 3),
        (ids(1, 2), 0),  # a turn was taken back
        (ids(1, 9, 3, 4), 0),
        (ids(7), 0),
    ],
)
def test_a_prompt_that_continues_the_last_text_is_new_from_its_end_on(later: TokenIds, start: int) -> None:
    text = FollowedText()
    assert [text.grow(ids(1, 2)), text.grow(ids(1, 2, 3))] == [0, 2]
    text.begin(later)
    assert text.grow(later) == start
    assert text.ids == later.tolist()


def test_an_empty_prompt_frees_the_text_at_once() -> None:
    text = FollowedText()
    text.grow(ids(1, 2))
    text.begin(ids())
    assert text.bytes_used == 0
    assert text.grow(ids(1, 2)) == 0

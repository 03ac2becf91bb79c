"""The suffix index against plain searches."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from edgespec.corpus import index
from edgespec.corpus.index import DEPTH, END_OF_TEXT, LONGEST_MATCH, SuffixIndex, sorted_places
from edgespec.drafters.suffix import CorpusMatch


def places_of(ids: list[int], wanted: list[int]) -> list[int]:
    return [i for i in range(len(ids) - len(wanted) + 1) if ids[i : i + len(wanted)] == wanted]


def longest_end(ids: list[int], text: list[int], most: int = LONGEST_MATCH) -> int:
    lengths = range(min(most, len(text)), 0, -1)
    return next((length for length in lengths if places_of(ids, text[len(text) - length :])), 0)


def random_corpus(rng: random.Random, size: int) -> list[int]:
    return [rng.choice((END_OF_TEXT, 0, 1, 2)) for _ in range(size)]


@pytest.mark.parametrize("packed_bits", [63, 0])
def test_places_are_sorted_by_what_follows(packed_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_PACKED_BITS", packed_bits)
    rng = random.Random(0)
    for size in (0, 1, 2, 3, 50, 300):
        ids = random_corpus(rng, size) + [5] * (size // 3)
        order = sorted_places(np.array(ids, np.int32)).tolist()
        assert sorted(order) == list(range(len(ids)))
        texts = [(ids[place:] + [END_OF_TEXT] * DEPTH)[:DEPTH] for place in order]
        cut = [text[: text.index(END_OF_TEXT)] if END_OF_TEXT in text else text for text in texts]
        assert cut == sorted(cut)


@pytest.mark.parametrize("seed", range(40))
def test_finding_and_following_are_those_of_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    ids = random_corpus(rng, rng.randint(1, 60))
    found = SuffixIndex.of(np.array(ids, np.int32))
    text = [rng.randint(0, 3) for _ in range(12)]
    span = found.longest_end(text)
    length = longest_end(ids, text)
    assert (0 if span is None else span.length) == length
    if span is None:
        return
    end = text[len(text) - length :]
    assert span.high - span.low == len(places_of(ids, end))
    after = Counter((*ids, END_OF_TEXT)[place + length] for place in places_of(ids, end))
    token_id, share = found.next_token(span)
    assert after[token_id] == max(after.values())
    if span.high - span.low <= 32:
        assert share == after[token_id] / after.total()
    copied = found.copied(span, 5)
    assert END_OF_TEXT not in copied
    assert places_of([*ids, END_OF_TEXT], end + copied)


@pytest.mark.parametrize("seed", range(40))
def test_a_match_that_is_kept_up_to_date_is_the_longest(seed: int) -> None:
    rng = random.Random(seed)
    ids = random_corpus(rng, 80)
    match = CorpusMatch(SuffixIndex.of(np.array(ids, np.int32)))
    text: list[int] = []
    while len(text) < 120:
        text += [rng.randint(0, 3) for _ in range(rng.choice((1, 1, 2, 5, 40)))]
        match.follow(text)
        assert match.length == longest_end(ids, text)
    match.restart()
    assert match.length == 0 and list(match.continued(4)) == []
    match.follow([2])
    assert match.length == (2 in ids)


def test_a_long_copy_is_followed_to_its_end_at_any_depth() -> None:
    """Matches are cut at their longest and grow again; a draft reaches beyond the depth to which places are sorted."""
    ids = np.random.default_rng(0).integers(0, 10_000, 600).astype(np.int32)
    match = CorpusMatch(SuffixIndex.of(np.append(ids, np.int32(END_OF_TEXT))))
    for end in range(4, 600):
        match.follow(ids[:end].tolist())
        assert LONGEST_MATCH >= match.length >= min(end, LONGEST_MATCH // 2)
        drafted = [token_id for token_id, *_ in match.continued(100)]
        assert drafted == ids[end : end + 100].tolist()


def test_the_commonest_continuation_is_chosen_from_any_number_of_places() -> None:
    ids = [1, 2, 3] * 500 + [1, 2, 4] * 100 + [END_OF_TEXT]
    found = SuffixIndex.of(np.array(ids, np.int32))
    span = found.find([1, 2])
    assert span is not None and span.high - span.low == 600
    token_id, share = found.next_token(span)
    assert token_id == 3 and abs(share - 5 / 6) < 0.05


def test_strings_that_no_text_holds() -> None:
    found = SuffixIndex.of(np.array([1, 2, END_OF_TEXT, 3, 4, END_OF_TEXT], np.int32))
    assert found.find([2, 3]) is None  # across the border of two texts
    assert found.find([9]) is None and found.find([0]) is None and found.find([1, 9, 2]) is None
    span = found.find([2])
    assert span is not None and found.copied(span, 3) == []
    empty = SuffixIndex.of(np.empty(0, np.int32))
    assert empty.longest_end([1, 2]) is None and empty.num_tokens == 0


def test_narrowing_stops_at_the_depth_to_which_places_are_sorted() -> None:
    found = SuffixIndex.of(np.zeros(200, np.int32))
    span = found.find([0] * DEPTH)
    assert span is not None and span.length == DEPTH
    assert found.narrowed(span, 0) is None
    match = CorpusMatch(found)
    match.follow([0] * 40)
    assert [token_id for token_id, *_ in match.continued(64)] == [0] * 64


def test_memory_is_told() -> None:
    found = SuffixIndex.of(np.arange(10_000, dtype=np.int32))
    assert 80_000 <= found.bytes_used <= 130_000

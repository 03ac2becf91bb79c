"""The n-gram counts against plain ones, and the drafter that asks them."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.cache import MAX_VOCABULARY, SIZES, CacheDrafter, CountTable, GrowingCounts, keys_of
from edgespec.errors import CapabilityError
from edgespec.sampling import Sampler

SAMPLER = Sampler(Sampling(temperature=0), 100)


def request(ids: list[int], most: int = 8) -> DraftRequest:
    return DraftRequest(np.array(ids, np.int32), most, SAMPLER)


def drafted(drafter: CacheDrafter, ids: list[int], most: int = 8) -> list[int]:
    return drafter.draft(request(ids, most)).token_ids.tolist()


def array(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def plain_counts(texts: list[list[int]]) -> dict[tuple[int, ...], Counter[int]]:
    found: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for ids in texts:
        for size in SIZES:
            for place in range(size, len(ids)):
                found[tuple(ids[place - size : place])][ids[place]] += 1
    return found


def key_of(ngram: tuple[int, ...]) -> int:
    return keys_of(ngram)[0]


def test_a_table_counts_as_a_plain_loop_does() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 6, int(size)).tolist() for size in rng.integers(0, 60, 40)]
    texts += [rng.integers(MAX_VOCABULARY - 3, MAX_VOCABULARY, 50).tolist()]
    table = CountTable([np.array(ids, np.int32) for ids in texts])
    counts = plain_counts(texts)
    assert len(counts) > 1000
    for ngram, after in counts.items():
        found = table.get(key_of(ngram))
        assert found is not None
        token_id, count, total = found
        assert total == after.total() and count == max(after.values()) == after[token_id]
    for ngram in ((1, 2, 3, 4, 5, 9), (7, 7), (0, 9)):
        assert table.get(key_of(ngram)) is None


def test_growing_counts_keep_the_majority_of_what_followed() -> None:
    rng = np.random.default_rng(1)
    ids = rng.choice(5, 3000, p=[0.7, 0.1, 0.1, 0.05, 0.05]).tolist()
    counts = GrowingCounts()
    for start in range(0, len(ids), 7):
        counts.add(ids[: start + 7], start)
    tested = 0
    for ngram, after in plain_counts([ids]).items():
        found = counts.get(key_of(ngram))
        assert found is not None and found[2] == after.total() and 0 < found[1] <= after[found[0]]
        token_id, most = after.most_common(1)[0]
        if 2 * most > after.total():
            tested += 1
            assert found[0] == token_id
    assert tested > 500


def test_the_longest_known_ngram_decides_and_this_text_before_others() -> None:
    drafter = CacheDrafter(100, [array(1, 2, 3, 50), array(1, 2, 3, 50), array(8, 3, 60)])
    drafter.begin(array(1))
    assert drafted(drafter, [1, 2, 3], 1) == [50]
    assert drafted(drafter, [1, 2, 3, 9, 9, 8, 3], 1) == [60]
    ids = [1, 2, 3, 70, 1, 2, 3]
    drafter.begin(array(*ids))
    assert drafted(drafter, ids, 2) == [70, 1], "the same n-gram in this text counts first"


def test_a_draft_ends_where_nothing_is_known_or_too_little_is_sure() -> None:
    drafter = CacheDrafter(100, [array(1, 2, 3, 4)])
    drafter.begin(array(9))
    assert drafted(drafter, [9, 1, 2]) == [3, 4]
    assert drafted(drafter, [9, 1, 2], 1) == [3] and drafted(drafter, [9, 1, 2], 0) == []
    assert drafted(drafter, [9, 1, 2, 8, 7]) == []
    torn = [array(1, 2, 10 + i, 1, 2) for i in range(40)]
    drafter = CacheDrafter(100, torn)
    drafter.begin(array(9))
    draft = drafter.draft(request([9, 1, 2]))
    assert 0 < draft.num_tokens < 8
    assert draft.evidence is not None and draft.evidence[0][1] < -1.0


def test_what_it_was_told_of_is_drafted_from_until_it_is_forgotten() -> None:
    drafter = CacheDrafter(100, [array(1, 2, 3, 4)])
    drafter.begin(array(5, 5))
    drafter.learn(array(20, 21, 22, 23))
    drafter.begin(array(6, 6))
    assert drafted(drafter, [6, 6, 20, 21]) == [22, 23]
    drafter.begin(array())
    drafter.begin(array(6, 6))
    assert drafted(drafter, [6, 6, 20, 21]) == []
    assert drafted(drafter, [6, 6, 20, 21, 1, 2]) == [3, 4], "what earlier runs left stays"


def test_memory_is_bounded_and_told() -> None:
    counts = GrowingCounts(max_tokens=2000)
    ids = np.random.default_rng(0).integers(0, 50_000, 20_000).tolist()
    sizes = []
    for start in range(0, len(ids), 100):
        counts.add(ids[: start + 100], start)
        sizes.append(counts.bytes_used)
    assert max(sizes) <= 2000 * len(SIZES) * 230 and sizes[-1] > max(sizes) / 3
    table = CountTable([np.array(ids, np.int32)])
    drafter = CacheDrafter(50_000, [np.array(ids, np.int32)])
    assert drafter.bytes_used == table.bytes_used
    assert 20_000 * 3 * 20 <= table.bytes_used <= 20_000 * 4 * 21 + (1 << 19)


def test_a_vocabulary_that_does_not_fit_the_keys_is_refused() -> None:
    with pytest.raises(CapabilityError, match="use drafter='suffix'"):
        CacheDrafter(MAX_VOCABULARY + 1)

"""The suffix automaton against a plain search, and the drafter that reads it."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.corpus.index import SuffixIndex, joined
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.suffix import SuffixAutomaton, SuffixDrafter
from edgespec.sampling.sampler import Sampler


def longest_earlier_suffix(ids: list[int]) -> int:
    n = len(ids)
    return next((k for k in range(n - 1, 0, -1) if any(ids[i : i + k] == ids[n - k :] for i in range(n - k))), 0)


def followers(ids: list[int], length: int) -> Counter[int]:
    """What followed each earlier place of the text's last `length` tokens."""
    end = ids[len(ids) - length :]
    return Counter(ids[i + length] for i in range(len(ids) - length) if ids[i : i + length] == end)


@pytest.mark.parametrize("seed", range(100))
def test_match_and_continuations_are_those_of_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randint(0, 2) for _ in range(rng.randint(1, 20))]  # short: every suffix link is counted
    automaton = SuffixAutomaton()
    automaton.extend(ids)
    state, length = automaton.match
    assert length == longest_earlier_suffix(ids)
    while length:
        best, total = automaton.best_continuation(state)
        followed = followers(ids, length)
        assert best is not None and followed[best[0]] == best[2] == max(followed.values())
        assert total >= followed.total()
        state, length = automaton.shorter(state)


def request(ids: list[int], max_tokens: int = 8) -> DraftRequest:
    return DraftRequest(np.array(ids, np.int32), max_tokens, Sampler(Sampling(temperature=0), 100))


def drafted(drafter: SuffixDrafter, ids: list[int], max_tokens: int = 8) -> list[int]:
    return drafter.draft(request(ids, max_tokens)).token_ids.tolist()


def test_the_commonest_continuation_of_the_longest_match_is_drafted() -> None:
    drafter = SuffixDrafter()
    ids = [1, 2, 3, 1, 2, 4, 1, 2, 4, 9, 1, 2]
    drafter.begin(np.array(ids[:3], np.int32))
    assert drafted(drafter, ids, 2) == [4, 1]
    assert drafted(drafter, [*ids, 3], 2) == [1, 2]


def test_a_longer_and_a_surer_match_speak_for_a_draft() -> None:
    drafter = SuffixDrafter()
    drafter.begin(np.array([1, 2, 3, 4, 5, 6, 7], np.int32))
    short = drafter.draft(request([1, 2, 3, 4, 5, 6, 7, 1]))
    long = drafter.draft(request([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]))
    assert long.evidence is not None and short.evidence is not None
    assert long.evidence[0][0] > short.evidence[0][0]
    drafter.begin(np.array([1, 2, 1, 2, 1, 2], np.int32))
    sure = drafter.draft(request([1, 2, 1, 2, 1, 2, 1]))
    drafter.begin(np.array([1, 2, 1, 3], np.int32))
    torn = drafter.draft(request([1, 2, 1, 3, 1]))
    assert sure.evidence is not None and torn.evidence is not None
    assert sure.evidence[0][1] > torn.evidence[0][1]


def test_nothing_is_drafted_where_nothing_matches() -> None:
    drafter = SuffixDrafter()
    drafter.begin(np.array([1, 2, 3], np.int32))
    assert drafted(drafter, [1, 2, 3, 4]) == []
    assert drafted(drafter, [1, 2, 3, 4, 1], 0) == []


def test_old_text_is_forgotten_and_memory_stays_bounded() -> None:
    drafter = SuffixDrafter(max_indexed=64)
    ids = list(np.random.default_rng(0).integers(0, 1000, 5000))
    drafter.begin(np.array(ids[:10], np.int32))
    sizes = []
    for end in range(20, len(ids), 10):
        drafter.draft(request(ids[:end]))
        sizes.append(drafter._automaton.num_tokens)
    assert max(sizes) <= 64 + 10
    tail = ids[-20:]
    assert drafted(drafter, [*ids, *tail[:5]], 3) == [int(token) for token in tail[5:8]]


def test_another_text_starts_afresh_and_the_same_one_goes_on() -> None:
    drafter = SuffixDrafter()
    drafter.begin(np.array([1, 2, 3, 4], np.int32))
    automaton = drafter._automaton
    drafter.begin(np.array([1, 2, 3, 4, 5], np.int32))
    assert drafter._automaton is automaton
    drafter.begin(np.array([1, 2, 3, 5, 6], np.int32))
    assert drafted(drafter, [1, 2, 3, 5, 6, 3])[:1] == [5]


def test_of_very_many_continuations_the_commonest_is_found() -> None:
    ids = [token for i in range(5, 300) for token in (1, 2, 1, i)] + [1, 500, 1]
    automaton = SuffixAutomaton()
    automaton.extend(ids)
    state, length = automaton.match
    while length > 1:
        state, length = automaton.shorter(state)
    best, total = automaton.best_continuation(state)
    assert best is not None and best[0] == 2 and total >= 295


def test_the_corpus_is_copied_from_where_its_match_is_clearly_longer() -> None:
    corpus = SuffixIndex.of(joined([np.array([11, 12, 13, 14, 15, 16], np.int32)]))
    drafter = SuffixDrafter(corpora=[corpus])
    drafter.begin(np.array([14, 50, 51], np.int32))
    assert drafted(drafter, [14, 50, 51, 14], 2) == [50, 51], "one token here, one there"
    assert drafted(drafter, [14, 50, 51, 14, 13, 14], 2) == [50, 51], "one here, two there"
    drafter.begin(np.array([14, 50, 51, 11], np.int32))
    draft = drafter.draft(request([14, 50, 51, 11, 12, 13, 14]))
    assert draft.token_ids.tolist() == [15, 16], "one here, four there"
    assert draft.evidence is not None and [one[3] for one in draft.evidence] == [-1.0, -1.0]
    assert drafted(drafter, [14, 50, 51, 11, 12, 13, 14, 99]) == []
    assert drafter.bytes_used >= corpus.bytes_used
    drafter.begin(np.array([7], np.int32))
    assert drafted(drafter, [7, 12], 2) == [13, 14], "nothing here, one there"


def test_of_several_corpora_the_longest_match_is_copied() -> None:
    texts = ([7, 8, 9, 1, 2, 3], [5, 7, 8, 9, 4, 5, 6])
    corpora = [SuffixIndex.of(joined([np.array(text, np.int32)])) for text in texts]
    for ordered in (corpora, corpora[::-1]):
        drafter = SuffixDrafter(corpora=ordered)
        drafter.begin(np.array([5], np.int32))
        assert drafted(drafter, [5, 7, 8, 9], 3) == [4, 5, 6]

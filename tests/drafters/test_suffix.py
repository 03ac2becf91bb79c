"""Lookups: the suffix automaton against a plain search, n-grams, predictions; what they draft, and at what work."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from bench_table import table_model
from edgespec import GenerateOptions, Sampling
from edgespec.config.values import DrafterName, DraftLength
from edgespec.corpus.index import SuffixIndex, joined
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.ngram import FollowedText, NgramDrafter
from edgespec.drafters.predicted import PREDICTION, PredictedDrafter
from edgespec.drafters.suffix import SuffixAutomaton, SuffixDrafter
from edgespec.errors import ConfigError
from edgespec.sampling.sampler import Sampler
from edgespec.types import TokenIds, Verdict


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
        state = automaton._link[state]
        length = automaton._length[state]


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
        state = automaton._link[state]
        length = automaton._length[state]
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


# -- the work of a drafting round does not depend on the length of the history; counted in lines, not timed


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


# -- prompt lookup


NGRAM_SAMPLER = Sampler(Sampling(), 100)


def array(*token_ids: int) -> TokenIds:
    return np.array(token_ids, np.int32)


def ngram_request(ids: list[int], most: int = 4) -> DraftRequest:
    return DraftRequest(np.array(ids, np.int32), most, NGRAM_SAMPLER)


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
        found = drafter.draft(ngram_request(ids, 6))
        assert found.token_ids.tolist() == slow_lookup(ids, 6, range(4, 1, -1))


def test_a_copy_that_reaches_the_end_repeats_its_period() -> None:
    drafter = NgramDrafter()
    drafter.begin(np.array([1, 2, 3, 1, 2, 3], np.int32))
    assert drafter.draft(ngram_request([1, 2, 3, 1, 2, 3], 7)).token_ids.tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_a_refused_place_is_not_proposed_from_again() -> None:
    ids = [1, 2, 3, 4, 1, 2, 9, 1, 2]
    drafter = NgramDrafter()
    drafter.begin(np.array(ids, np.int32))
    first = drafter.draft(ngram_request(ids, 2))
    assert first.token_ids.tolist() == [9, 1]
    drafter.observe(first, Verdict((), 5))
    assert drafter.draft(ngram_request(ids, 2)).num_tokens == 0
    assert drafter.draft(ngram_request([*ids, 3, 4], 2)).token_ids.tolist() == [1, 2]


def test_the_evidence_of_a_token_grows_with_its_match() -> None:
    for ids, size in (([1, 2, 3] * 4, 4), ([9, 1, 2, 3, 8, 1, 2, 3], 3), ([9, 1, 2, 8, 7, 1, 2], 2)):
        drafter = NgramDrafter()
        drafter.begin(np.array(ids, np.int32))
        draft = drafter.draft(ngram_request(ids))
        assert draft.evidence == tuple((math.log2(size + count) - 2.0,) for count in range(draft.num_tokens))
    assert drafter.is_free


def test_a_new_generation_forgets_the_old_text_unless_it_goes_on_from_it() -> None:
    drafter = NgramDrafter()
    drafter.begin(np.array([1, 2, 3, 4], np.int32))
    drafter.begin(np.array([1, 2, 3, 4, 5, 1, 2], np.int32))
    assert drafter.draft(ngram_request([1, 2, 3, 4, 5, 1, 2], 1)).token_ids.tolist() == [3]
    drafter.begin(np.array([7, 1, 2], np.int32))
    assert drafter.draft(ngram_request([7, 1, 2])).num_tokens == 0


def test_a_long_history_takes_bounded_memory_and_its_latest_half_is_found() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 20_000).tolist()
    drafter = NgramDrafter(max_indexed=2000)
    most = 0
    for end in range(100, len(ids), 100):
        drafter.draft(ngram_request(ids[:end]))
        most = max(most, len(drafter._places))
    assert most <= 3 * 2000
    end = len(ids) - 100
    for back in (4, 300, 900):
        again = [*ids[:end], *ids[end - back : end - back + 3]]
        assert drafter.draft(ngram_request(again, 1)).token_ids.tolist() == [ids[end - back + 3]]
        drafter.begin(np.array(ids[:end], np.int32))


def test_an_empty_prompt_frees_the_text_at_once() -> None:
    text = FollowedText()
    text.grow(array(1, 2))
    text.begin(array())
    assert text.bytes_used == 0
    assert text.grow(array(1, 2)) == 0


# -- drafting from what the caller expects the answer to be


PROMPT = [50, 51, 1, 2]  # whose end is not the beginning of the answer
PREDICTED = np.array([1, 2, 3, 4, 5, 6, 3, 4, 9], np.int32)


def predicted(drafter: PredictedDrafter, answer: list[int], most: int = 3) -> list[int]:
    request = DraftRequest(np.array(PROMPT + answer, np.int32), most, NGRAM_SAMPLER, predicted_ids=PREDICTED)
    return drafter.draft(request).token_ids.tolist()


def begun() -> PredictedDrafter:
    drafter = PredictedDrafter()
    drafter.begin(np.array(PROMPT, np.int32))
    return drafter


@pytest.mark.parametrize(
    ("answer", "draft"),
    [
        ([1], [2, 3, 4]),
        ([1, 2, 3, 4], [5, 6, 3]),
        ([1, 2, 70], [4, 5, 6]),  # another token in place of 3
        ([1, 2, 70, 71, 3], [4, 5, 6]),  # two put in
        ([1, 2, 70, 71, 72, 5], [6, 3, 4]),  # three in place of two
        ([1, 2, 5], [6, 3, 4]),  # 3 and 4 left out
        ([1, 2, 3, 4, 5, 70, 6, 3], [4, 9]),  # the nearest 3 ahead
        ([70, 71, 5, 6, 3, 4], [9]),
        ([1, 2, 3, 4, 5, 6, 3, 4, 9], []),
        ([1, 2, 3, 4, 5, 6, 3, 4, 9, 2, 3], [4, 5, 6]),  # again from the beginning
    ],
)
def test_the_answer_is_followed_through_the_prediction(answer: list[int], draft: list[int]) -> None:
    step_by_step = begun()
    for end in range(1, len(answer) + 1):
        found = predicted(step_by_step, answer[:end])
    assert found == predicted(begun(), answer) == draft


def test_there_is_nothing_to_draft_without_a_prediction() -> None:
    request = DraftRequest(np.array([1, 2], np.int32), 4, NGRAM_SAMPLER)
    assert not begun().serves(request) and not begun().draft(request).num_tokens


def test_another_answer_has_another_prediction() -> None:
    drafter = begun()
    assert predicted(drafter, [1, 2]) == [3, 4, 5] and drafter.bytes_used
    drafter.begin(np.array([1], np.int32))
    request = DraftRequest(np.array([1, 7], np.int32), 2, NGRAM_SAMPLER, predicted_ids=np.array([7, 8], np.int32))
    assert drafter.draft(request).token_ids.tolist() == [8]


@pytest.mark.parametrize("drafter, length", [("auto", "auto"), ("ngram", 4), ("model", 3), ("model", "auto")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prediction_changes_no_text(
    tmp_path: Path, drafter: DrafterName, length: DraftLength, temperature: float
) -> None:
    with table_model(tmp_path, pass_s=0.0005) as model:
        sampling, fixed = Sampling(temperature=temperature, seed=5), {"max_tokens": 60, "logprobs": True}
        plain = model.generate("abc", sampling, GenerateOptions(drafter="none", **fixed))  # type: ignore[arg-type]
        swapped = plain.text[:20] + "aa" + plain.text[23:]
        for text in (plain.text, swapped, plain.text[::-1], "", "l" * 5000):
            options: Any = {"drafter": drafter, "draft_length": length, "prediction": text} | fixed
            found = [*model.stream("abc", sampling, GenerateOptions(**options))]
            assert [event.token_id for event in found] == list(plain.token_ids)
            assert [event.logprob for event in found] == list(plain.logprobs)
            num_predicted = sum(event.drafter == PREDICTION for event in found)
            # With "auto" what passes took on this machine decides how much is predicted.
            assert num_predicted > 40 or text != plain.text or length == "auto"


def test_a_prediction_is_a_text() -> None:
    with pytest.raises(ConfigError, match="prediction must be text"):
        GenerateOptions(prediction=5)  # type: ignore[arg-type]

"""Prompts beside a narrow width class: cut by their tokens alone, so that any history of the cache gives equal bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Model, Sampling
from edgespec.engines import widths
from edgespec.engines.sequence import CachedSequence, CachedText, at_once, block_marks
from edgespec.engines.widths import ClassWatch
from edgespec.types import Batch, Draft, TokenIds
from table_engine import TableEngine

BLOCK = 4
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=4)
Answered = tuple[tuple[int, ...], tuple[float, ...]]


def ids_of(*token_ids: int) -> TokenIds:
    return np.array(token_ids, np.int32)


@pytest.mark.parametrize(("length", "passes"), [(1, [1]), (2, [2]), (11, [4, 8, 10, 11]), (5, [4, 5]), (6, [4, 6])])
def test_where_a_prompt_is_cut(length: int, passes: list[int]) -> None:
    sequence = CachedSequence(narrow_table())
    ends: list[int] = []
    at_once(sequence.feeding(ids_of(*range(length)), lambda: ends.append(sequence.length)))
    assert ends == passes and sequence.text[1:] == block_marks(length, BLOCK)


def test_a_block_that_is_held_in_part_is_read_again() -> None:
    prompt = ids_of(*range(1, 11))
    held = CachedText(prompt, *block_marks(prompt.size, BLOCK))
    assert held.shared_length(ids_of(*range(1, 12)), BLOCK) == 8
    assert held.shared_length(prompt, BLOCK) == 9
    assert held.shared_length(ids_of(1, 2, 3, 4, 5, 6, 50, 8, 9, 10), BLOCK) == 4
    assert held.shared_length(ids_of(1, 2, 3), BLOCK) == 0
    decoded = CachedText(prompt)
    assert decoded.shared_length(ids_of(*range(1, 12)), BLOCK) == 0
    assert decoded.shared_length(ids_of(*range(1, 12)), 0) == 10


def narrow_table() -> TableEngine:
    engine = TableEngine.random(100, order=1, context_length=200, max_batch=64, end_id=99)
    engine.facts = dataclasses.replace(engine.facts, pinned_class=(1, 3), prompt_block=BLOCK)
    return engine


def test_what_was_decoded_is_read_again_in_the_next_prompt() -> None:
    sequence = CachedSequence(narrow_table())
    first = ids_of(1, 2, 3, 4, 5, 90, 91)
    sequence.feed(first)
    for token_id in (20, 21, 22):
        sequence.feed(ids_of(token_id))
    at_once(sequence.scoring(23, Draft.chain([24, 25])))
    sequence.keep(23, Draft.chain([24, 25]), (0,))
    second = ids_of(*first, 20, 21, 22, 23, 24, 99, 6, 7, 90)
    assert sequence.reuse(second) == BLOCK
    sequence.feed(second[sequence.length :])
    assert sequence.text[1:] == block_marks(second.size, BLOCK)
    assert sequence.reuse(second) == second.size - 1
    sequence.rollback(6)
    sequence.feed(second[6:])  # behind a part of a block
    assert sequence.reuse(second) == BLOCK


def test_a_class_that_is_refuted_while_blocks_are_read_leaves_them_whole() -> None:
    engine = narrow_table()
    sequence = CachedSequence(engine)
    sequence.most_rows = 3  # others wait
    passes = sequence.feeding(ids_of(*range(1, 14)))
    request = next(passes)
    engine.facts = dataclasses.replace(engine.facts, pinned_class=None, prompt_block=0)
    widths = []
    with pytest.raises(StopIteration):
        while True:
            widths.append(request.batch.width)
            request = passes.send(engine.forward(request.batch))
    assert sum(widths) == sequence.length == 13


@pytest.mark.parametrize(("class_key", "ends"), [("", [5, 10, 15, 19]), ("tried widths", [19])])
def test_beside_running_answers_a_prompt_is_cut_unless_its_width_decides_bits(class_key: str, ends: list[int]) -> None:
    engine = TableEngine.random(100, order=1, context_length=200, max_batch=64, end_id=99)
    engine.facts = dataclasses.replace(engine.facts, pinned_class=(1, 64), class_key=class_key)
    sequence, found = CachedSequence(engine), list[int]()
    sequence.most_rows = 5  # others wait
    at_once(sequence.feeding(ids_of(*range(19)), lambda: found.append(sequence.length)))
    assert found == ends


def test_a_watch_looks_at_no_token_of_a_block() -> None:
    sequence = CachedSequence(narrow_table())
    sequence.feed(ids_of(*range(1, 14)))
    assert sequence.latest_in_class(3) == 1
    sequence.feed(ids_of(50))
    assert sequence.latest_in_class(3) == 2
    seen: list[int] = []
    inner = sequence.engine.forward
    sequence.engine.forward = lambda batch: seen.append(batch.width) or inner(batch)  # type: ignore[method-assign]
    logits = sequence.feed(ids_of(51))[None].copy()
    for _ in range(20):
        ClassWatch().look(sequence, logits)
    assert set(seen) <= {1, 2, 3}


class Narrow(TableEngine):
    """A table that rounds otherwise in passes of four rows and of five."""

    def forward(self, batch: Batch) -> Any:
        logits = super().forward(batch)
        return np.nextafter(logits, np.float32(np.inf)) if batch.width in (4, 5) else logits


class Forgetful(Narrow):
    """One whose state depends on how many wide passes there were."""

    passes = 0

    def forward(self, batch: Batch) -> Any:
        self.passes += int(batch.width > 63)
        return super().forward(batch)

    def save_state(self, sequence: int = 0) -> bytes:
        return super().save_state(sequence) + bytes([self.passes % 256])


@pytest.mark.parametrize("kind", [Narrow, Forgetful])
def test_blocks_are_used_where_they_give_the_same_bits_each_time(kind: type[TableEngine]) -> None:
    engine = kind.random(512, order=1, seed=3, context_length=512, max_batch=200)
    engine.facts = dataclasses.replace(engine.facts, pinned_class=None)
    facts = widths.pinned_facts(engine, f"blocks {kind.__name__}", widest=63, advice="")
    assert facts.pinned_class == (1, 3)
    assert facts.prompt_block == (0 if kind is Forgetful else widths.BLOCK)
    assert engine.length() == 0


# -- real kernels


@pytest.fixture(scope="module")
def narrow(q4_k_m_path: Path) -> Iterator[Model]:
    """The demo target in Q4_K, whose kernels round otherwise from four rows on."""
    options = {"engine": "llamacpp", "context_length": 1024, "parallel": 3, "max_slowdown": 1.0}
    with edgespec.load(str(q4_k_m_path), reproducible=True, threads=TEST_THREADS, **options) as model:
        if not model.target.facts.prompt_block:
            pytest.skip(f"the class of this processor is wide: {model.target.facts.pinned_class}")
        yield model


QUESTION = {"role": "user", "content": widths.TEXT[:900] + " Which of these places is the cheapest?"}
LATER = {"role": "user", "content": "I would like to book a table there for four people. " + widths.TEXT[900:1300]}


def answered(model: Model, ids: list[int], sampling: Sampling, drafter: Any = "none") -> Answered:
    options = GenerateOptions(max_tokens=20, drafter=drafter, draft_length=2, ignore_eos=True)
    result = model.generate(ids, sampling, options)
    assert result.reproducible
    return tuple(result.token_ids), tuple(result.logprobs)


@pytest.fixture(scope="module")
def second_turn(narrow: Model) -> list[int]:
    """A conversation of two questions, with the model's answer to the first between."""
    narrow.forget()
    result = narrow.chat([QUESTION], GREEDY, GenerateOptions(max_tokens=20, drafter="none")).result()
    return narrow.encode_chat([QUESTION, {"role": "assistant", "content": result.text}, LATER])


def test_prompts_are_read_in_wide_passes(narrow: Model, second_turn: list[int]) -> None:
    assert narrow.target.facts.pinned_class[1] < 32  # type: ignore[index]
    narrow.forget()
    assert answered(narrow, second_turn, GREEDY)
    reading = narrow.stats.target_passes - 19
    assert reading < 0.2 * len(second_turn)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
@pytest.mark.parametrize(
    "history", ["the same", "its first turn", "an edited one", "a cancelled answer", "parked", "saved", "raw tokens"]
)
def test_any_history_of_the_cache_gives_the_same_bits(
    narrow: Model, second_turn: list[int], sampling: Sampling, drafter: Any, history: str, tmp_path: Path
) -> None:
    narrow.forget()
    expected = answered(narrow, second_turn, sampling)
    if history != "the same":
        narrow.forget()
    match history:
        case "its first turn":
            narrow.chat([QUESTION], GREEDY, GenerateOptions(max_tokens=20, drafter=drafter)).result()
        case "an edited one":
            edited = [*second_turn[:200], *second_turn[230:]]
            answered(narrow, edited, sampling, drafter)
        case "a cancelled answer":
            options = GenerateOptions(max_tokens=40, drafter=drafter, ignore_eos=True)
            with narrow.stream(second_turn, Sampling(seed=9), options) as events:
                for _ in zip(range(6), events, strict=False):
                    pass
                events.cancel()
        case "parked":
            answered(narrow, second_turn, sampling, drafter)
            answered(narrow, narrow.encode("Something else altogether. " * 20), GREEDY)
        case "saved":
            answered(narrow, second_turn, sampling, drafter)
            narrow.save_state(tmp_path / "x.state")
            narrow.forget()
            narrow.load_state(tmp_path / "x.state")
        case "raw tokens":
            told = answered(narrow, second_turn[:150], SAMPLED, drafter)[0]
            narrow.generate([*second_turn[:150], *told, 5, 6], GREEDY, GenerateOptions(max_tokens=3))
    assert answered(narrow, second_turn, sampling, drafter) == expected
    assert narrow.stats.reused_tokens >= widths.BLOCK


def test_answers_side_by_side_have_the_bits_that_they_have_alone(narrow: Model, second_turn: list[int]) -> None:
    prompts = [second_turn, second_turn[:170], narrow.encode("A table for two, please."), second_turn, second_turn[40:]]
    expected = []
    for prompt in prompts:
        narrow.forget()
        expected.append(answered(narrow, prompt, SAMPLED))
    narrow.forget()
    for drafter in ("none", "ngram", "auto"):
        options = GenerateOptions(max_tokens=20, drafter=drafter, ignore_eos=True)
        found = narrow.generate_all(prompts, SAMPLED, options)
        assert [(tuple(each.token_ids), tuple(each.logprobs)) for each in found] == expected

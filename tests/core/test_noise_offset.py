"""Noise in a conversation: text after dropped turns must not get the random numbers of the dropped text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from edgespec.chat.conversation import Conversation
from edgespec.cli.dialogue import Chat
from edgespec.cli.session import Session
from edgespec.config.options import GenerateOptions, LoadOptions, SessionOptions
from edgespec.config.sources import Settings
from edgespec.control.base import FixedLength
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.formats.manifest import ModelFile, ModelPair
from edgespec.generation.decode import autoregressive, speculative
from edgespec.generation.run_state import Run
from edgespec.reports import TokenEvent
from edgespec.runtime import Model
from edgespec.sampling import Sampler
from edgespec.sampling.acceptance import RULES
from edgespec.sampling.noise import Noise, Stream
from edgespec.sampling.stopping import StopRules
from lossless import PLAIN
from table_engine import TableEngine

LETTERS = 20
ANSWER = 60
CONTEXT = 512


def ids(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    """A conversation with a table whose next letter depends on the last one alone."""
    target = TableEngine.random(LETTERS, order=1, seed=5, context_length=CONTEXT)
    options = GenerateOptions(max_tokens=ANSWER)
    (tmp_path / "table.gguf").write_text("")
    pair = ModelPair("table", {"target": ModelFile(tmp_path / "table.gguf")})
    model = Model(LoadOptions(drafter="none"), pair, target, {})
    return Chat(Session(model, Settings({}, {}), dataclasses.replace(PLAIN, seed=3), options, SessionOptions()))


def repeats(chat: Chat) -> float:
    """The largest share of the last answer's letters that stand at their place in an earlier answer too."""
    *earlier, last = [ids(turn["content"]) for turn in chat.conversation.turns if turn["role"] == "assistant"]
    return max(float(np.mean(np.array(last) == np.array(answer))) for answer in earlier)


def test_an_answer_after_dropped_turns_does_not_repeat_an_older_one(
    chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, dropped = [], False
    for _ in range(24):
        chat.say("abab")
        dropped = dropped or "dropped the oldest" in capsys.readouterr().err
        if dropped and len(chat.conversation.turns) > 2:
            seen.append(repeats(chat))
    assert len(seen) > 8
    assert np.mean(seen) < 0.2  # chance is .05, and the best of several earlier answers is taken


def grown(count: int) -> Conversation:
    conversation = Conversation("abc")
    for end in range(100, 100 * count + 1, 100):
        conversation.ask("a question")
        conversation.answer("an answer", end)
    return conversation


def test_a_conversation_that_only_grows_has_no_offset() -> None:
    assert Conversation().noise_offset(7) == 0
    assert grown(3).noise_offset(300) == grown(3).noise_offset(350) == 0


def test_dropped_turns_are_counted_on_and_undone_ones_are_not() -> None:
    conversation = grown(3)
    conversation.ask("once more")
    conversation.drop_oldest()
    assert conversation.noise_offset(220) == 80
    while conversation.drop_oldest():
        pass
    assert conversation.noise_offset(20) == 280  # no answer is left in it, and the user has read them all
    conversation.answer("an answer", 360)
    conversation.undo()
    assert conversation.noise_offset(20) == 280
    conversation.clear()
    assert conversation.noise_offset(20) == 0


def test_used_noise_is_saved_and_hidden_from_templates(tmp_path: Path) -> None:
    conversation = grown(3)
    conversation.drop_oldest()
    assert all(set(message) == {"role", "content"} for message in conversation.messages)
    conversation.save(tmp_path / "saved.json")
    loaded = Conversation.load(tmp_path / "saved.json")
    assert loaded == conversation
    assert [loaded.undo(), loaded.undo()] == ["a question"] * 2
    assert loaded.noise_offset(10) == 90


def events(target: TableEngine, drafter: Drafter | None, rule: str, length: int, offset: int) -> list[TokenEvent]:
    cached = CachedSequence(target)
    sampler = Sampler(dataclasses.replace(PLAIN, seed=8), target.vocabulary.size, offset)
    run = Run(cached, np.array([0, 1], np.int32), sampler, StopRules(frozenset(), (), 200))
    if drafter is None:
        return list(autoregressive(run))
    return list(speculative(run, FixedLength(drafter, length), RULES[rule]))


def test_offsets_give_other_texts_and_the_same_log_probabilities() -> None:
    target = TableEngine.random(seed=1, context_length=300)
    texts = {offset: events(target, None, "coupled", 0, offset) for offset in (0, 1, 977)}
    assert len({tuple(event.token_id for event in found) for found in texts.values()}) == 3
    for found in texts.values():
        history = [0, 1]
        for event in found:
            row = target.row(history).astype(np.float64)
            assert event.logprob == pytest.approx(row[event.token_id] - np.log(np.exp(row).sum()), abs=1e-5)
            history.append(event.token_id)


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4])
def test_a_draft_is_drawn_with_the_shifted_noise(factor: float) -> None:
    """A draft whose logits are the target's, the temperature undone, is always right: if it has the same noise."""
    target = TableEngine.random(seed=1, context_length=300)
    same = TableEngine(target._table * np.float32(factor), order=2, context_length=300)
    drafter = ModelDrafter(same, temperature=factor)
    found = events(target, drafter, "coupled", 6, 977)
    assert np.mean([event.from_draft for event in found[1:]]) > 0.8
    sampler = Sampler(dataclasses.replace(PLAIN, seed=8), 10, 977)
    draft = ModelDrafter(same, temperature=factor).draft(DraftRequest(np.array([1, 2, 3], np.int32), 6, sampler))
    told = [1, 2, 3]
    for token_id in draft.token_ids.tolist():
        assert token_id == sampler.pick(sampler.distribution(target.row(told), np.array(told, np.int32)), len(told))
        told.append(token_id)


def test_an_offset_shifts_every_stream_and_none_changes_nothing() -> None:
    shifted, plain = Noise(4, 30), Noise(4)
    tokens = np.arange(5, dtype=np.int32)
    for stream in Stream:
        assert shifted.uniform(stream, 7, 2) == plain.uniform(stream, 37, 2)
        assert np.array_equal(shifted.exponential(stream, 7, tokens), plain.exponential(stream, 37, tokens))

"""Models with a running state: what is dropped leaves no trace, drafts change no text, and memory is planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.footprint import MOST_SNAPSHOTS, footprint, num_snapshots, state_bytes
from edgespec.engines.model_use import MOST_CHECKPOINTS, ModelUse
from edgespec.engines.sequence import PROMPT_END
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.header import read_header
from edgespec.generation.handle import Result
from edgespec.kernels.library import library_path
from edgespec.types import Batch
from lossless import assert_same_text
from tiny_gguf import write_model, write_recurrent_model

PROMPT = "the cat sat on the mat, the cat sat on the"


@pytest.fixture(params=["lfm2", "qwen35"])
def hybrid(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(f"{request.param}_path")
    return found


@pytest.fixture(params=["llamacpp", "onnx"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "onnx" and library_path() is None:
        pytest.skip("the kernels are not built: scripts/run.py test builds them")
    return str(request.param)


def bits_of(engine: str, result: Result) -> object:
    """What is the same in any passes: on the kernels log probabilities as well."""
    return result.token_ids, result.logprobs if engine == "onnx" else None


def opened(path: Path, **given: object) -> LlamaCppEngine:
    return LlamaCppEngine.load(path, context_length=256, max_batch=64, threads=1, **given)


def test_no_more_is_dropped_than_there_are_snapshots_of(hybrid: Path) -> None:
    with opened(hybrid) as engine:
        engine.forward(Batch.chain(range(20)))
        with pytest.raises(CapabilityError, match="cannot be rolled back to 11 of 20 tokens"):
            engine.rollback(11)
        engine.rollback(0)
        engine.forward(Batch.chain(range(5)))
        engine.rollback(3)
        with pytest.raises(CapabilityError):
            engine.rollback(2)  # only once
        engine.rollback(0)
        engine.forward(Batch.chain(range(5)))
        engine.forward(Batch.chain([1]))
        with pytest.raises(CapabilityError):
            engine.rollback(5)  # all rows of the last pass: the state before it is not kept
        engine.rollback(0)
        assert engine.forward(Batch.chain([1])).shape[0] == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["ngram", "auto", "model"])
def test_drafts_change_no_text(hybrid: Path, tmp_path: Path, drafter: str, temperature: float) -> None:
    """Of a float32 model, whose passes of different widths hardly round differently."""
    draft = write_model(tmp_path / "draft.gguf")
    options = GenerateOptions(max_tokens=48, ignore_eos=True)
    with edgespec.load(hybrid, draft=draft, threads=1, engine="llamacpp") as model:
        assert not any("speculation is off" in note for note in model.notes)
        for seed in range(3):
            sampling = Sampling(temperature=temperature, seed=seed)
            plain = model.generate(PROMPT, sampling, replace(options, drafter="none"))
            for length in (1, 4, 12):
                found = model.generate(PROMPT, sampling, replace(options, drafter=drafter, draft_length=length))
                assert found.token_ids == plain.token_ids
                assert np.allclose(found.logprobs, plain.logprobs, atol=1e-3)
            if drafter == "model":
                assert 4 < found.stats.drafted_tokens / found.stats.rounds <= MOST_SNAPSHOTS


def test_answers_at_once_are_those_alone(hybrid: Path, engine: str) -> None:
    prompts = [PROMPT, "a b a b a b a", "x y z x y z x" * 9]
    sampling, options = Sampling(temperature=0.8, seed=3), GenerateOptions(max_tokens=30, ignore_eos=True)
    with edgespec.load(hybrid, threads=1, engine=engine, parallel=3, drafter="ngram", draft_length=4) as model:
        together = model.generate_all(prompts, sampling, options)
        for prompt, found in zip(prompts, together, strict=True):
            model.forget()
            plain = model.generate(prompt, sampling, replace(options, drafter="none"))
            assert bits_of(engine, plain) == bits_of(engine, found)


def test_a_conversation_goes_on_from_its_state(hybrid: Path) -> None:
    """The next prompt continues all that is cached, so that nothing needs to be rolled back."""
    options = GenerateOptions(max_tokens=12, ignore_eos=True)
    with edgespec.load(hybrid, threads=1, engine="llamacpp", drafter="ngram", draft_length=4) as model:
        ids = model.encode(PROMPT)
        first = model.generate(ids, Sampling(temperature=0), options)
        longer = [*ids, *first.token_ids, *model.encode(" and more")]
        second = model.generate(longer, Sampling(temperature=0), options)
        assert second.stats.reused_tokens >= len(ids)
        model.forget()
        assert model.generate(longer, Sampling(temperature=0), options).token_ids == second.token_ids


@pytest.mark.parametrize("name", ["lfm2", "qwen35", "mamba"])
def test_a_draft_with_a_running_state_changes_no_text(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """For a target without one: it returns to the text that is certain before each draft.

    The Mamba has another vocabulary, so that each of the target's tokens may be several of its own.
    """
    target, mamba = write_model(tmp_path / "target.gguf"), write_recurrent_model(tmp_path / "mamba.gguf")
    draft = mamba if name == "mamba" else request.getfixturevalue(f"{name}_path")
    with edgespec.load(target, draft=draft, threads=1, engine="llamacpp", reproducible=True) as model:
        found = assert_same_text(model, [("model", 1), ("model", 5)], num_tokens=24)
    assert all(stats.drafted_tokens for stats in found.values())


def test_a_draft_of_the_same_weights_is_accepted_whole(hybrid: Path, engine: str) -> None:
    """It would not be where it drafted from anything but the text."""
    options = GenerateOptions(max_tokens=40, ignore_eos=True, drafter="model", draft_length=4)
    with edgespec.load(hybrid, draft=hybrid, threads=1, engine=engine) as model:
        stats = model.generate(PROMPT, Sampling(temperature=0.9, seed=4), options).stats
    assert stats.accepted_tokens == stats.drafted_tokens > 0


def test_a_prompt_that_goes_on_otherwise_is_read_from_a_checkpoint(hybrid: Path, engine: str) -> None:
    """As chat templates leave out what opened the answer, or the reasoning in it."""
    options = GenerateOptions(max_tokens=48, ignore_eos=True)
    question = list(range(30, 110))
    with edgespec.load(hybrid, threads=1, engine=engine) as model:
        model.generate(question, Sampling(temperature=0), options)
        other = [*question[:-3], *range(200, 240)]
        found = model.generate(other, Sampling(temperature=0), options)
        assert found.stats.reused_tokens == len(question) - PROMPT_END
        model.forget()
        again = model.generate(other, Sampling(temperature=0), options)
        assert again.stats.reused_tokens == 0 and bits_of(engine, again) == bits_of(engine, found)


def test_lookups_alone_do_not_make_plain_passes_slower(hybrid: Path) -> None:
    with edgespec.load(hybrid, threads=1, engine="llamacpp") as model:
        (note,) = [note for note in model.notes if note.startswith("speculation is off")]
        assert "more than lookups alone earn" in note and not model.target.facts.can_speculate
    with edgespec.load(hybrid, threads=1, engine="llamacpp", drafter="suffix") as model:
        assert model.target.facts.rollback_rows == MOST_SNAPSHOTS


def test_reproducible_mode_is_refused_by_name(hybrid: Path) -> None:
    with pytest.raises(CapabilityError, match="keep a running state, whose bits depend"):
        edgespec.load(hybrid, threads=1, engine="llamacpp", reproducible=True)


def test_the_state_has_the_planned_size(hybrid: Path) -> None:
    state = state_bytes(read_header(hybrid))
    assert state and num_snapshots(read_header(hybrid), speculates=True) == MOST_SNAPSHOTS
    with opened(hybrid) as engine:
        engine.forward(Batch.chain(range(10)))
        keys_and_values = 10 * engine.facts.kv_bytes_per_token
        assert 0 <= len(engine.save_state()) - keys_and_values - state < 1000
        planned = footprint(hybrid, ModelUse(256)).cache
        plain = footprint(hybrid, ModelUse(256, speculates=False)).cache
        assert planned - plain == MOST_SNAPSHOTS * state
        assert plain > (1 + MOST_CHECKPOINTS) * state


def test_a_model_without_snapshots_decodes_plainly(tmp_path: Path) -> None:
    path = write_recurrent_model(tmp_path / "mamba.gguf")
    header = read_header(path)
    assert state_bytes(header) and not num_snapshots(header, speculates=True)
    with edgespec.load(path, threads=1, engine="llamacpp", drafter="ngram") as model:
        assert "speculation is off: this model cannot roll back its state" in model.notes
        assert model.generate(PROMPT, options=GenerateOptions(max_tokens=5)).stats.drafted_tokens == 0

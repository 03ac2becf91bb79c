"""Layers with a sliding window: llama.cpp saves only the cells in it, so a loaded text cannot be shortened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.footprint import footprint
from edgespec.engines.model_use import ModelUse
from edgespec.errors import CapabilityError
from edgespec.types import Batch, TokenIds

WINDOW, SIZE = 16, 300
GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def engine(windowed_path: Path) -> Iterator[LlamaCppEngine]:
    with LlamaCppEngine.load(
        windowed_path, context_length=256, threads=1, max_sequences=2, reproducible=False
    ) as found:
        yield found


def text(seed: int, length: int) -> TokenIds:
    return np.random.default_rng(seed).integers(10, SIZE, length).astype(np.int32)


def test_a_loaded_text_is_continued_and_not_shortened(engine: LlamaCppEngine):
    ids = text(0, 60)
    assert engine.facts.state_window == WINDOW
    engine.forward(Batch.chain(ids[:48]))
    state = engine.save_state()
    wanted = engine.forward(Batch.chain(ids[48:])).copy()
    assert engine.reachable(20) == 20
    engine.load_state(state)
    assert np.array_equal(engine.forward(Batch.chain(ids[48:])), wanted)
    assert [engine.reachable(length) for length in (60, 50, 48, 47, 20, 0)] == [60, 50, 48, 0, 0, 0]
    engine.rollback(50)
    assert np.array_equal(engine.forward(Batch.chain(ids[50:])), wanted[2:])
    with pytest.raises(CapabilityError, match=r"last 16 tokens .* loaded with 48 tokens, cannot be rolled back to 20"):
        engine.rollback(20)
    assert engine.length() == 60
    engine.rollback(0)
    engine.forward(Batch.chain(ids))
    assert engine.reachable(20) == 20


def test_sequences_have_cells_of_their_own_although_trees_are_wanted(windowed_path: Path):
    """In shared cells llama.cpp overwrites those behind a window; a rollback may return to them."""
    with LlamaCppEngine.load(
        windowed_path, context_length=128, threads=1, max_sequences=2, max_branches=2, reproducible=False
    ) as engine:
        assert engine.facts.max_branches == 0
        ids = text(3, 100)
        for sequence in (0, 1):
            engine.forward(Batch.chain(ids[:60], sequence=sequence))
        wanted = engine.forward(Batch.chain(ids[60:80], sequence=1)).copy()
        engine.rollback(0, 0)
        for start in range(80, 100, 2):
            engine.forward(Batch.chain(ids[start : start + 2], sequence=1))
        engine.rollback(60, 1)
        assert np.array_equal(engine.forward(Batch.chain(ids[60:80], sequence=1)), wanted)


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_conversation_that_was_left_and_edited_is_answered_as_a_new_one(windowed_path: Path, parallel: int):
    """A text that was parked for another one comes back without what lies behind its windows."""
    with edgespec.load(str(windowed_path), parallel=parallel, context_length=256, reproducible=True) as model:
        first, other = list(map(int, text(4, 120))), list(map(int, text(5, 120)))
        edited = first[:80] + list(map(int, text(6, 30)))
        options = GenerateOptions(max_tokens=8, ignore_eos=True)
        wanted = {}
        for name, ids in (("first", first), ("edited", edited)):
            model.forget()
            wanted[name] = model.generate(ids, GREEDY, options)
        model.forget()
        for name, ids in (("first", first), ("", other), ("edited", edited), ("", other), ("first", first)):
            found = model.generate(ids, GREEDY, options)
            if name:
                assert (found.token_ids, found.logprobs) == (wanted[name].token_ids, wanted[name].logprobs), name


@pytest.mark.usefixtures("without_kernels")
def test_the_watch_over_the_width_class_shortens_no_loaded_state(windowed_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It reads the last rows again in another width, for which a loaded text cannot always be rolled back."""
    monkeypatch.setattr("edgespec.engines.widths.SHARE", 1.0)
    options = GenerateOptions(max_tokens=20, ignore_eos=True)
    with edgespec.load(str(windowed_path), context_length=256, reproducible=True, threads=1) as model:
        texts = [list(map(int, text(seed, 120))) for seed in (4, 5)]
        for _ in range(2):
            for ids in texts:
                ids += [*model.generate(ids, GREEDY, options).token_ids, 20]
        assert model._executor.class_watch.rows_compared


def test_the_plan_gives_every_text_cells_of_its_own(windowed_path: Path):
    with_trees, without = (
        footprint(windowed_path, ModelUse(100, max_sequences=2, max_branches=most)) for most in (16, 0)
    )
    one = footprint(windowed_path, ModelUse(100))
    assert with_trees.cache == without.cache == 2 * one.cache

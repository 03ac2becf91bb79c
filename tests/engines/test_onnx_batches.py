"""Single rows of several sequences in one pass of ONNX Runtime, each over a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnxruntime", reason="the ONNX engine needs onnxruntime")

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx.passes import SharedPasses
from edgespec.errors import EngineError
from edgespec.types import Batch, packed

CONTEXT, SEQUENCES = 48, 4
LENGTHS = (7, 20, 13, 30)


@pytest.fixture(scope="module", params=["f32", "int8"])
def loaded(request: pytest.FixtureRequest, onnx_path: Path) -> Iterator[OnnxEngine]:
    with OnnxEngine.load(
        onnx_path,
        context_length=CONTEXT,
        max_sequences=SEQUENCES,
        threads=TEST_THREADS,
        reproducible=False,
        cache_type_k=request.param,
    ) as engine:
        yield engine


@pytest.fixture
def engine(loaded: OnnxEngine) -> OnnxEngine:
    for sequence in range(SEQUENCES):
        loaded.rollback(0, sequence)
    return loaded


def text(sequence: int) -> NDArray[np.int32]:
    return np.random.default_rng(sequence).integers(0, 200, CONTEXT).astype(np.int32)


def read(engine: OnnxEngine, sequence: int, length: int) -> None:
    begin = engine.length(sequence)
    engine.forward(Batch.chain(text(sequence)[begin:length], sequence=sequence, last_only=True))


def next_rows(engine: OnnxEngine, widths: dict[int, int]) -> Batch:
    at = {sequence: engine.length(sequence) for sequence in widths}
    return packed(
        [Batch.chain(text(each)[at[each] : at[each] + width], sequence=each) for each, width in widths.items()]
    )


@pytest.mark.parametrize(
    "widths", [{0: 1, 1: 1, 2: 1, 3: 1}, {3: 1, 0: 1}, {2: 1, 1: 1}, {1: 1, 0: 4, 3: 1}, {0: 2, 1: 3}], ids=str
)
def test_rows_have_the_results_that_they_have_alone(engine: OnnxEngine, widths: dict[int, int]) -> None:
    """Also the rows after them: idle caches in between lose nothing."""
    expected = {}
    for sequence, length in enumerate(LENGTHS):
        read(engine, sequence, length)
        end = length + widths.get(sequence, 0)
        chain = Batch.chain(text(sequence)[length : end + 4], sequence=sequence)
        expected[sequence] = engine.forward(chain).copy()
        engine.rollback(length, sequence)
    found, place = engine.forward(next_rows(engine, widths)).copy(), 0
    for sequence, width in widths.items():
        rows = found[place : place + width]
        np.testing.assert_allclose(rows, expected[sequence][:width], atol=0.05 * expected[sequence].std())
        place += width
    for sequence, length in enumerate(LENGTHS):
        assert engine.length(sequence) == length + widths.get(sequence, 0)
        begin = engine.length(sequence)
        after = engine.forward(Batch.chain(text(sequence)[begin : begin + 4], sequence=sequence))
        wanted = expected[sequence][widths.get(sequence, 0) :]
        np.testing.assert_allclose(after, wanted, atol=0.05 * wanted.std())


def test_single_rows_share_one_pass(engine: OnnxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for sequence, length in enumerate(LENGTHS):
        read(engine, sequence, length)
    passes: list[object] = []
    run = engine._passes._run  # type: ignore[attr-defined]
    monkeypatch.setattr(engine._passes, "_run", lambda binding: (passes.append(binding), run(binding)))
    engine.forward(next_rows(engine, dict.fromkeys(range(SEQUENCES), 1)))
    assert len(passes) == 1
    engine.forward(next_rows(engine, {0: 1, 1: 3, 2: 1, 3: 2}))
    assert len(passes) == 1 + 3
    assert engine.facts.can_pack and engine.facts.splits_passes and not engine.facts.can_tree


def test_a_full_cache_between_two_others_stays_whole(engine: OnnxEngine) -> None:
    for sequence, length in enumerate((7, CONTEXT, 13)):
        read(engine, sequence, length)
    before = engine.save_state(1)
    engine.forward(next_rows(engine, {0: 1, 2: 1}))
    assert engine.save_state(1) == before and engine.length(0) == 8 and engine.length(2) == 14


def test_empty_caches_between_two_others_stay_empty(engine: OnnxEngine) -> None:
    alone = engine.forward(Batch.chain(text(1)[:5], sequence=1)).copy()
    engine.rollback(0, 1)
    for sequence in (0, 3):
        read(engine, sequence, 9)
    engine.forward(next_rows(engine, {0: 1, 3: 1}))
    assert engine.length(1) == engine.length(2) == 0
    np.testing.assert_array_equal(engine.forward(Batch.chain(text(1)[:5], sequence=1)), alone)


def test_a_graph_made_for_one_text_gets_passes_in_turn(onnx_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another exporter's may: here the batch gives the first text's logits to both."""
    load = partial(OnnxEngine.load, onnx_path, context_length=16, max_sequences=2)
    run_each = SharedPasses.run_each

    def confused(self: SharedPasses, *given: Any) -> NDArray[np.float32]:
        logits = run_each(self, *given)
        logits[1] = logits[0]
        return logits

    def refused(self: SharedPasses, *given: Any) -> NDArray[np.float32]:
        raise EngineError("the shapes do not fit")

    for broken in (confused, refused):
        with monkeypatch.context() as patched:
            patched.setattr(SharedPasses, "run_each", broken)
            with load(threads=TEST_THREADS, reproducible=False) as engine:
                assert not engine.facts.can_pack and not engine.facts.splits_passes
                for sequence in (0, 1):
                    read(engine, sequence, 5)
                engine.forward(next_rows(engine, {0: 1, 1: 1}))
    with load(threads=TEST_THREADS, reproducible=False) as engine:
        assert engine.facts.can_pack and engine.facts.splits_passes


def test_several_chats_have_caches_of_their_own() -> None:
    options = {"engine": "onnx", "threads": TEST_THREADS, "context_length": 128, "parallel": 3}
    with edgespec.load("demo", **options) as model:
        assert model.target.facts.splits_passes and model.target.facts.can_pack
        texts = model.generate_all(["one", "two two", "three"], Sampling(), GenerateOptions(max_tokens=20))
        for prompt, result in zip(["one", "two two", "three"], texts, strict=True):
            model.forget()
            alone = model.generate(prompt, Sampling(), GenerateOptions(max_tokens=1))
            assert result.logprobs[0] == pytest.approx(alone.logprobs[0], abs=0.05)

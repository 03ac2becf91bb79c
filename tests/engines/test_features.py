"""Hidden states from the engines to the drafters: aligned with the tokens, cut with them, no bit of logits moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo import TEST_THREADS
from edgespec.engines.base import Engine
from edgespec.engines.head import PROMPT_FEATURES, KeptFeatures
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.model_use import WINDOW
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.sequence import CachedSequence, at_once
from edgespec.errors import CapabilityError
from edgespec.types import Batch, Draft, packed
from table_engine import TableEngine

Load = Callable[..., Engine]
IDS = (np.arange(300) * 7 % 250).astype(np.int32)


def load_onnx(path: Path, **options: bool) -> Engine:
    return OnnxEngine.load(path, threads=TEST_THREADS, context_length=512, hidden_states=True, **options)


@pytest.fixture(params=("llamacpp", "onnx", "onnx-concatenated", "llamacpp-tiny"))
def load(
    request: pytest.FixtureRequest, target_path: Path, tiny_path: Path, onnx_path: Path, concatenated_path: Path
) -> Load:
    gguf = {"llamacpp": target_path, "llamacpp-tiny": tiny_path}
    graphs = {"onnx": onnx_path, "onnx-concatenated": concatenated_path}
    if request.param in gguf:
        path = gguf[request.param]
        length = 512 if request.param == "llamacpp" else 128
        return lambda **options: LlamaCppEngine.load(path, threads=TEST_THREADS, context_length=length, **options)
    return lambda **options: load_onnx(graphs[request.param], **options)


def test_no_bit_of_the_logits_depends_on_them(load: Load) -> None:
    found = []
    for wanted in (False, True):
        with load(reproducible=True) as engine:
            engine.give_hidden_states(wanted)
            rows = [engine.forward(Batch.chain(IDS[a:b])).copy() for a, b in ((0, 20), (20, 21), (21, 24))]
            rows.append(engine.forward(Batch.chain(IDS[24:60], last_only=True)).copy())
            found.append(np.concatenate(rows))
            if wanted:
                assert engine.hidden_states().shape[0] == 36
                assert np.isfinite(engine.hidden_states()).all()
    np.testing.assert_array_equal(*found)


def test_a_row_is_that_of_its_token(load: Load) -> None:
    """However the tokens came, the states are those of one pass over all of them."""
    with load(reproducible=False) as engine:
        engine.give_hidden_states(True)
        engine.forward(Batch.chain(IDS[:40]))
        whole = engine.hidden_states().copy()
        engine.rollback(0)
        cached = CachedSequence(engine)
        cached.keep_features(True)
        cached.feed(IDS[:30])
        at_once(cached.scoring(int(IDS[30]), Draft.chain([int(IDS[31]), int(IDS[32]), 5])))
        cached.keep(int(IDS[30]), Draft.chain([int(IDS[31]), int(IDS[32]), 5]), (0, 1))
        cached.rollback(25)
        cached.feed(IDS[25:40])
        assert cached.features is not None
        np.testing.assert_allclose(cached.features, whole, atol=0.05 * whole.std())


def test_states_of_a_branch_follow_the_branch(target_path: Path) -> None:
    tree = Draft(
        np.array([9, IDS[11], 9, IDS[12]], np.int32), np.array([-1, -1, 0, 1], np.int32), np.ones(4, np.float32)
    )
    with LlamaCppEngine.load(target_path, threads=TEST_THREADS, context_length=512, reproducible=False) as engine:
        straight = CachedSequence(engine)
        straight.keep_features(True)
        straight.feed(IDS[:13])
        assert straight.features is not None
        wanted = straight.features.copy()
        branched = CachedSequence(engine)
        branched.keep_features(True)
        branched.feed(IDS[:10])
        at_once(branched.scoring(int(IDS[10]), tree))
        branched.keep(int(IDS[10]), tree, (1, 3))
        assert branched.features is not None
        np.testing.assert_allclose(branched.features, wanted, atol=0.05 * wanted.std())


@pytest.mark.parametrize(("most", "passes", "kept"), [(50, 6, PROMPT_FEATURES + 49), (IDS.size, 2, PROMPT_FEATURES)])
def test_of_a_long_prompt_only_the_end_is_computed(most: int, passes: int, kept: int) -> None:
    """A pass that is too wide for the states of all of its rows is split."""
    engine = TableEngine.random(250, order=2, context_length=400, max_batch=most)
    cached = CachedSequence(engine)
    cached.keep_features(True)
    cached.feed(IDS)
    assert cached.features is not None
    assert PROMPT_FEATURES <= len(cached.features) <= kept
    assert cached.num_fed == passes
    np.testing.assert_array_equal(cached.features[-1], engine.row(IDS.tolist()))


def test_tokens_fed_while_nobody_wanted_states_have_none() -> None:
    engine = TableEngine.random(250, order=2, context_length=400, max_batch=50)
    cached = CachedSequence(engine)
    cached.feed(IDS[:20])
    assert cached.features is None
    cached.keep_features(True)
    cached.feed(IDS[20:23])
    assert cached.features is not None
    np.testing.assert_array_equal(cached.features, [engine.row(IDS[:n].tolist()) for n in (21, 22, 23)])
    cached.keep_features(False)
    cached.feed(IDS[23:25])
    cached.keep_features(True)
    cached.feed(IDS[25:26])
    assert cached.features is not None and len(cached.features) == 1


def test_rows_are_aligned_whatever_is_appended_and_cut() -> None:
    """Against a plain dictionary of position to row, over random appends and cuts."""
    rng = np.random.default_rng(0)
    states = np.zeros((0, 3), np.float32)
    rows, known, length, least = KeptFeatures(lambda: states), {}, 0, 0
    rows.switch(True)
    for _ in range(2000):
        if rng.random() < 0.3:
            before, length = length, int(rng.integers(max(0, length - 40), length + 1))
            rows.truncate(length)
            least = max(least - (before - length), 0)
        if rng.random() < 0.02:
            length += 5  # tokens without states
            known.clear()
            least = 0
        count = int(rng.integers(1, 30))
        states = rng.standard_normal((count, 3), np.float32)
        rows.append(length)
        known = {p: row for p, row in known.items() if p < length} | {length + i: s for i, s in enumerate(states)}
        length += count
        least = min(least + count, WINDOW)  # of those that were cut, older ones may still be there
        found = rows.latest(length)
        assert found is not None and least <= len(found) <= min(WINDOW, len(known))
        np.testing.assert_array_equal(found, [known[p] for p in range(rows.start, length)])
        if length > 2000:
            rows.truncate(length := 100)
            least = 0


def test_an_engine_says_when_it_has_none(target_path: Path, onnx_path: Path) -> None:
    without = OnnxEngine.load(onnx_path, threads=TEST_THREADS, context_length=64, reproducible=False)
    with without as engine, pytest.raises(CapabilityError, match="load it with hidden_states=True"):
        CachedSequence(engine).keep_features(True)
    with LlamaCppEngine.load(target_path, threads=TEST_THREADS, context_length=64, reproducible=False) as engine:
        engine.forward(Batch.chain([1, 2]))
        with pytest.raises(CapabilityError, match="give_hidden_states"):
            engine.hidden_states()


# -- inputs of layers


def load_with_layers(path: Path, layers: tuple[int, ...]) -> Engine:
    if path.suffix != ".gguf":
        return load_onnx(path, state_layers=layers)  # type: ignore[arg-type]
    return load_gguf(path, state_layers=layers)


def load_gguf(path: Path, **options: Any) -> LlamaCppEngine:
    return LlamaCppEngine.load(
        path, **{"threads": TEST_THREADS, "context_length": 512, "reproducible": False} | options
    )


def states_of(engine: Engine, count: int = 24) -> np.ndarray:
    engine.give_hidden_states(True)
    engine.forward(Batch.chain(IDS[:count]))
    return engine.hidden_states().copy()


def test_inputs_of_layers_precede_the_last_states(target_path: Path, onnx_path: Path) -> None:
    """Both engines, of the same model, give the same ones."""
    layers = (0, 2, 5)
    found = []
    for path in (target_path, onnx_path):
        with load_with_layers(path, layers) as engine:
            assert engine.state_layers == layers
            states = states_of(engine)
            width = states.shape[1] // 4
            found.append(states.reshape(len(states), 4, width))
        with load_with_layers(path, ()) as engine:
            np.testing.assert_allclose(states_of(engine), found[-1][:, 3], atol=1e-4)
    for place in range(4):
        ours, theirs = (states[:, place] for states in found)
        cosines = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
        assert cosines.mean() > 0.99, place
    distances = [np.abs(found[0][:, a] - found[0][:, b]).max() for a, b in ((0, 1), (1, 2), (2, 3))]
    assert min(distances) > 0.01  # they are states of different depths


def test_layers_that_a_model_lacks_are_refused(target_path: Path, onnx_path: Path, concatenated_path: Path) -> None:
    for path, layer in ((target_path, 99), (onnx_path, 99), (concatenated_path, 1)):
        with pytest.raises(CapabilityError, match=f"layer {layer}"):
            load_with_layers(path, (layer,))


def test_an_eagle3_head_and_other_layers_exclude_each_other(target_path: Path) -> None:
    with load_gguf(target_path, hidden_states=True) as engine, pytest.raises(CapabilityError, match="leave one out"):
        engine.read_layers_alone((2,))


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize(
    ("name", "layers", "rows"),
    [
        ("target_path", (), (3, 1, 5)),
        ("target_path", (0, 5), (3, 1, 5)),
        ("onnx_path", (), (1, 3, 1)),
        *(("onnx_path", (0, 5), rows) for rows in ((1, 1, 1), (2, 1, 1), (4, 2, 3))),
    ],
)
def test_rows_of_several_texts_have_the_states_that_they_have_alone(
    name: str, layers: tuple[int, ...], rows: tuple[int, ...], reproducible: bool, request: pytest.FixtureRequest
) -> None:
    """Of texts of unequal lengths, in a shared pass or in one each; by bits in reproducible mode."""
    options: dict[str, Any] = {"max_sequences": 3, "reproducible": reproducible, "state_layers": layers}
    path = request.getfixturevalue(name)
    with load_onnx(path, **options) if name == "onnx_path" else load_gguf(path, **options) as engine:
        engine.give_hidden_states(True)
        parts, alone = [], []
        for sequence, count in enumerate(rows):
            first, read = 90 * sequence, 10 * (sequence + 1)
            engine.forward(Batch.chain(IDS[first : first + read], sequence=sequence))
            parts.append(Batch.chain(IDS[first + read : first + read + count], sequence=sequence))
            engine.forward(parts[-1])
            alone.append(engine.hidden_states().copy())
            engine.rollback(read, sequence)
        if name == "target_path" and not engine.facts.can_pack:
            pytest.skip("passes in turn: this engine packs nothing in reproducible mode")
        engine.forward(packed(parts))
        found, expected = engine.hidden_states(), np.concatenate(alone)
        assert found.shape == expected.shape
        if reproducible:
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(found, expected, atol=0.05 * expected.std())

"""w8a8: products of whole numbers are exact, a row's bits are its own, and every way to run a model takes it.

The model is the demo target: its shipped weights made plain float32 again, so that no exporter is needed.
"""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.engines.onnx import OnnxEngine, sessions, unsigned
from edgespec.errors import ModelFileError
from edgespec.export.check import compare, limits_of
from edgespec.export.reference import Reference
from edgespec.platform.machine import products_saturate
from edgespec.types import Batch, Logits
from lossless import PROMPTS
from plain_demo import plain_demo

onnx = pytest.importorskip("onnx")

from edgespec.export.onnx.cut import early_exit_onnx  # noqa: E402
from edgespec.export.onnx.integer import to_integer  # noqa: E402
from edgespec.export.onnx.quantise import save  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from edgespec.formats.onnx.w8a8 import quantise_columns  # noqa: E402

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "models" / "demo"
LAYERS, EXIT = 9, 4
INNER, OUTER = 96, 80
TEXT = " ".join(PROMPTS) + " def clamp(value, low, high):\n    return max(low, min(value, high))\n" * 3
Matrix = NDArray[np.float32]


@pytest.fixture(scope="module")
def plain(onnx_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not onnx_path.is_file():
        pytest.skip(f"{onnx_path.relative_to(REPOSITORY)} is not shipped in this checkout")
    return plain_demo(onnx_path.parent, tmp_path_factory.mktemp("plain") / "target")


@pytest.fixture(scope="module")
def whole(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(plain.parent, tmp_path_factory.mktemp("whole") / "target")
    assert to_integer(folder, 64) == LAYERS * 5 + 1
    return folder / "model.onnx"


def open_engine(path: Path, **options: Any) -> OnnxEngine:
    wanted = {"context_length": 400, "threads": TEST_THREADS, "reproducible": False, **options}
    return OnnxEngine.load(path, **wanted)


def score(engine: OnnxEngine, ids: NDArray[np.int32]) -> Logits:
    return engine.forward(Batch.chain(ids)).copy()


def text_ids(engine: OnnxEngine) -> NDArray[np.int32]:
    return np.array(engine.vocabulary.encode(TEXT), np.int32)


# One product.


def product(folder: Path, weights: Matrix, opset: int = 22) -> Path:
    """A graph of nothing but `x` [1, rows, K] times `weights` [K, N]."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "rows", len(weights)])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "rows", weights.shape[1]])
    node = helper.make_node("MatMul", ["x", "weights"], ["logits"], "product")
    graph = helper.make_graph([node], "product", [x], [logits], [numpy_helper.from_array(weights, "weights")])
    folder.mkdir(parents=True, exist_ok=True)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), folder)
    return folder


def strange_rows() -> Matrix:
    """Sixteen rows: ordinary ones, zeros, one outlier, numbers near both ends of float32, all codes at the ends."""
    rows = np.random.default_rng(0).normal(size=(16, INNER)).astype(np.float32)
    rows[3] = 0
    rows[5, 7] = 3e4
    rows[6] *= 1e36
    rows[8] *= 1e-41
    rows[9] = -7
    rows[10] = 7
    return rows


def exact(rows: Matrix, weights: Matrix) -> Matrix:
    """What a product of whole numbers is, in numpy."""
    codes, scales = quantise_columns(weights)
    row_scales = np.maximum(np.abs(rows).max(1) * np.float32(1 / 127), np.finfo(np.float32).tiny)[:, None]
    sums = np.rint(rows / row_scales).astype(np.int64) @ codes.astype(np.int64)
    found: Matrix = sums.astype(np.float32) * scales * row_scales
    return found


@pytest.mark.parametrize("opset", [17, 22])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_exact_at_every_width_and_beside_any_rows(tmp_path: Path, opset: int, threads: int) -> None:
    weights = np.random.default_rng(1).normal(size=(INNER, OUTER)).astype(np.float32)
    weights[:, 4], weights[:, 5] = 0, 1  # a column of zeros, one whose sums would pass 16 bits
    folder = product(tmp_path / "model", weights, opset)
    assert to_integer(folder, 64) == 1
    graph = (folder / "model.onnx").read_bytes()
    session, _ = sessions.open_session(graph, folder, threads=threads, provider="cpu")
    rows = strange_rows()
    expected = exact(rows, weights)
    assert np.isfinite(expected).all() and not expected[3].any()
    for width in range(1, 17):
        for start in range(17 - width):
            (found,) = session.run(None, {"x": rows[None, start : start + width]})
            np.testing.assert_array_equal(found[0], expected[start : start + width])


def test_a_row_is_as_close_as_eight_bits_allow() -> None:
    weights = np.random.default_rng(1).normal(size=(INNER, OUTER)).astype(np.float32)
    rows = np.random.default_rng(2).normal(size=(8, INNER)).astype(np.float32)
    off = exact(rows, weights) - rows @ weights
    assert np.abs(off).max() < 0.02 * np.abs(rows @ weights).max()


def test_a_processor_that_saturates_takes_unsigned_weights(
    whole: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits from the kernels that such a processor is sent to; other graphs are not asked about."""
    with open_engine(whole) as engine:
        ids = text_ids(engine)[:24]
        expected = score(engine, ids)
    asked: list[bool] = []
    monkeypatch.setattr(sessions, "products_saturate", lambda: asked.append(True) or True)
    with open_engine(plain) as engine:
        assert not asked
    with open_engine(whole) as engine:
        np.testing.assert_array_equal(score(engine, ids), expected)
    assert asked


@pytest.mark.parametrize("count", [1, 8])  # a single row has a kernel of its own
def test_signed_products_are_exact_where_the_machine_says_so(count: int) -> None:
    if products_saturate():
        pytest.skip("this processor lacks VNNI: its signed products are not used")
    weights = numpy_helper.from_array(np.full((INNER, OUTER), 127, np.int8), "weights")
    codes = helper.make_tensor_value_info("codes", TensorProto.UINT8, ["rows", INNER])
    sums = helper.make_tensor_value_info("sums", TensorProto.INT32, ["rows", OUTER])
    node = helper.make_node("MatMulInteger", ["codes", "weights"], ["sums"])
    graph = helper.make_graph([node], "saturation", [codes], [sums], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session, _ = sessions.open_session(model.SerializeToString(), Path(), threads=1, provider="cpu")
    assert (session.run(None, {"codes": np.full((count, INNER), 255, np.uint8)})[0] == 255 * 127 * INNER).all()


def test_weights_made_unsigned_here_give_the_bits_of_onnx_runtimes_own(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "products_saturate", lambda: True)
    left: list[bool] = []

    def watched(graph: bytes, folder: Path) -> tuple[bytes, unsigned.Weights, bool]:
        made = unsigned.make_unsigned(graph, folder)
        left.append(made[2] or not made[1])
        return made

    monkeypatch.setattr(sessions, "make_unsigned", watched)
    with open_engine(whole) as engine:
        ids = text_ids(engine)[:24]
        ours = score(engine, ids)
    assert left == [False]  # nothing is left to what takes ONNX Runtime long
    monkeypatch.setattr(sessions, "make_unsigned", lambda graph, folder: (graph, {}, True))
    with open_engine(whole) as engine:
        np.testing.assert_array_equal(score(engine, ids), ours)


@pytest.mark.parametrize("reads_packed", [True, False])
def test_weights_made_for_a_session_live_as_long_as_it_reads_them(
    whole: Path, monkeypatch: pytest.MonkeyPatch, reads_packed: bool
) -> None:
    """ONNX Runtime points at them unless it packed them: freed too early, reading them ends the process."""
    monkeypatch.setattr(sessions, "products_saturate", lambda: True)
    monkeypatch.setattr(sessions, "reads_packed_weights", lambda: reads_packed)
    made: list[weakref.ref[np.ndarray]] = []

    def watched(graph: bytes, folder: Path) -> tuple[bytes, unsigned.Weights, bool]:
        found = unsigned.make_unsigned(graph, folder)
        made.extend(map(weakref.ref, found[1].values()))
        return found

    monkeypatch.setattr(sessions, "make_unsigned", watched)
    with open_engine(whole):
        gc.collect()
        assert made and all((each() is None) == reads_packed for each in made)
    gc.collect()
    assert all(each() is None for each in made)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_weights_are_refused_and_nothing_is_replaced(tmp_path: Path, bad: float) -> None:
    weights = np.ones((INNER, OUTER), np.float32)
    weights[2, 3] = bad
    folder = product(tmp_path / "model", weights)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ModelFileError, match="not finite numbers"):
        to_integer(folder, 64)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_graph_without_products_is_refused(tmp_path: Path) -> None:
    folder = product(tmp_path / "model", np.ones((INNER, 8), np.float32))  # too few columns to be worth it
    with pytest.raises(ModelFileError, match="nothing to quantise"):
        to_integer(folder, 64)


def test_a_truncated_data_file_is_refused(tmp_path: Path) -> None:
    folder = product(tmp_path / "model", np.ones((INNER, OUTER), np.float32))
    data = folder / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="ends before it"):
        to_integer(folder, 64)


# A model.


def test_each_input_is_quantised_once(whole: Path) -> None:
    model = onnx.load(whole, load_external_data=False)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MatMulIntegerToFloat") == LAYERS * 5 + 1
    assert kinds.count("Round") == LAYERS * 4 + 1  # gate and up read one input
    assert not {"MatMul", "MatMulNBits", "Transpose"} & set(kinds)
    assert (whole.parent / "model.onnx.data").stat().st_size < 10.5e6  # of 8.1 M weights and embeddings of 1.0 M
    assert not list(whole.parent.glob("*.tmp"))


def test_it_passes_the_check_of_every_export(plain: Path, whole: Path) -> None:
    with open_engine(plain) as engine:
        ids = text_ids(engine)
        expected = score(engine, ids)
        begins_with = engine.vocabulary.bos_id if engine.vocabulary.adds_bos else None
    with open_engine(whole) as engine:
        found = compare(Reference((ids,), (expected,), begins_with, "float32"), engine)
    assert found.num_tokens > 80
    assert found.complaint(limits_of("w8a8")) == ""
    assert found.mean_kl > 1e-6  # it is quantised


def test_rows_left_out_change_no_other(whole: Path) -> None:
    with open_engine(whole, hidden_states=True) as engine:
        ids = text_ids(engine)[:20]
        every = score(engine, ids)
        states = engine.hidden_states().copy()
        assert states.shape == (20, 256)
        engine.rollback(0)
        last = engine.forward(Batch.chain(ids, last_only=True)).copy()
        np.testing.assert_array_equal(last[-1], every[-1])
        np.testing.assert_array_equal(engine.hidden_states(), states)
    with open_engine(whole) as engine:
        np.testing.assert_array_equal(score(engine, ids), every)


@pytest.fixture(scope="module")
def pair(whole: Path) -> Iterator[edgespec.Model]:
    draft = DEMO / "onnx" / "draft" / "model.onnx"
    with edgespec.load(str(whole), draft=draft, reproducible=True, threads=TEST_THREADS) as model:
        yield model


def test_wide_passes_are_one_class(pair: edgespec.Model) -> None:
    facts = pair.target.facts
    assert facts.pinned_class is not None
    assert facts.pinned_class[0] <= 2 and facts.pinned_class[1] >= 16


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_text_does_not_depend_on_the_draft(pair: edgespec.Model, prompt: str, temperature: float) -> None:
    ids = pair.encode_chat([{"role": "user", "content": prompt}])
    sampling = Sampling(temperature=temperature, seed=4)
    plain = pair.generate(ids, sampling, GenerateOptions(max_tokens=48, drafter="none", ignore_eos=True))
    for drafter, length in (("model", 1), ("model", 4), ("model", 11), ("ngram", 6), ("auto", "auto")):
        options = GenerateOptions(max_tokens=48, drafter=drafter, draft_length=length, ignore_eos=True)
        found = pair.generate(ids, sampling, options)
        assert found.token_ids == plain.token_ids, (drafter, length)
        assert found.logprobs == plain.logprobs, (drafter, length)
        assert found.reproducible


def test_an_exit_shares_its_layers_to_the_bit(whole: Path, tmp_path: Path) -> None:
    """In three parts it computes what it computes in one, drafts in between or not; the draft's own graph as well."""
    folder = shutil.copytree(whole.parent, tmp_path / "target")
    draft = early_exit_onnx(folder, EXIT)
    ids = np.random.default_rng(3).integers(3, 4000, 60).astype(np.int32)
    with (
        open_engine(whole, reproducible=True) as one,
        open_engine(whole, reproducible=True, exit_layer=EXIT) as three,
        open_engine(draft, reproducible=True) as short,
    ):
        for start, stop in ((0, 1), (1, 30), (30, 31), (31, 43), (43, 60)):
            np.testing.assert_array_equal(score(one, ids[start:stop]), score(three, ids[start:stop]))
        for engine in (one, three):
            engine.rollback(40)
        found = three.early_exit()
        assert found.follow(ids[:41]) == 40
        np.testing.assert_array_equal(found.feed(ids[40:50]), score(short, ids[:50])[-1])
        np.testing.assert_array_equal(score(one, ids[40:52]), score(three, ids[40:52]))


def test_an_exit_drafts_without_changing_the_text(whole: Path) -> None:
    options = {"reproducible": True, "threads": TEST_THREADS}
    sampling = Sampling(temperature=0.8, seed=1)
    with edgespec.load(str(whole), drafter="early-exit", exit_layer=EXIT, **options) as model:
        ids = model.encode_chat([{"role": "user", "content": PROMPTS[0]}])
        found = model.generate(ids, sampling, GenerateOptions(max_tokens=40, draft_length=3, ignore_eos=True))
        plain = model.generate(ids, sampling, GenerateOptions(max_tokens=40, drafter="none", ignore_eos=True))
    assert found.stats.drafted_tokens > 0
    assert found.token_ids == plain.token_ids


def test_a_cache_that_grows_by_concatenation(concatenated_path: Path, tmp_path: Path) -> None:
    """As Optimum exports it, the weights inside of the graph."""
    folder = shutil.copytree(concatenated_path.parent, tmp_path / "model")
    assert to_integer(folder, 64) == 5
    with open_engine(concatenated_path) as plain, open_engine(folder / "model.onnx") as whole:
        ids = text_ids(plain)[:30]
        expected = score(plain, ids)
        found = np.concatenate([score(whole, ids[:17]), score(whole, ids[17:18]), score(whole, ids[18:])])
    assert 0 < np.abs(found - expected).max() < 0.1 * expected.std()

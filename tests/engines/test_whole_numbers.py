"""w8a8: a row's bits are its own, and every way to run a model takes it. The model is the demo target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("gguf", reason="the graph is made by an export: scripts/run.py install export")

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.engines.onnx import OnnxEngine, sessions
from edgespec.export.onnx.writer import convert_gguf, open_gguf
from edgespec.platform.machine import products_saturate
from edgespec.types import Batch, Logits
from lossless import PROMPTS

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

TARGET = DEMO / "demo-target-q8_0.gguf"
INNER, OUTER = 96, 80
TEXT = " ".join(PROMPTS) + " def clamp(value, low, high):\n    return max(low, min(value, high))\n" * 3


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(open_gguf(TARGET), tmp_path_factory.mktemp("plain"), "fp32")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(open_gguf(TARGET), tmp_path_factory.mktemp("whole"), "w8a8")


def open_engine(path: Path, **options: Any) -> OnnxEngine:
    wanted = {"context_length": 400, "threads": TEST_THREADS, "reproducible": False, **options}
    return OnnxEngine.load(path, **wanted)


def score(engine: OnnxEngine, ids: NDArray[np.int32]) -> Logits:
    return engine.forward(Batch.chain(ids)).copy()


def text_ids(engine: OnnxEngine) -> NDArray[np.int32]:
    return np.array(engine.vocabulary.encode(TEXT), np.int32)


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

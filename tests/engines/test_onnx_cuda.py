"""Graphs as they are adapted for NVIDIA's GPUs through CUDA, run on the processor, which has kernels for them too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx import OnnxEngine, library
from edgespec.engines.onnx import engine as engines
from edgespec.engines.onnx.footprint import footprint
from edgespec.errors import CapabilityError
from edgespec.types import Batch, Logits
from half import as_for_cuda
from lossless import assert_same_text
from tiny_graphs import CASES, difference, graph, logits, tiny_files
from tiny_graphs import IDS as TOKENS

HALF = 0.01  # of the logits' standard deviation: float16 keeps 11 bits, over the layers of a small model
CODES = 0.1  # where products round their inputs to 8 bits, small changes become one of a code
IDS = np.random.default_rng(0).integers(0, 4000, 60).astype(np.int32)


@pytest.fixture(scope="module")
def plain_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return graph(DEMO / "hf" / "target", tmp_path_factory.mktemp("plain") / "target")


def load(path: Path, **options: object) -> OnnxEngine:
    settings = {"context_length": 200, "max_sequences": 2, "max_batch": 64, "reproducible": False} | options
    return OnnxEngine.load(path, threads=TEST_THREADS, provider="cpu", **settings)  # type: ignore[arg-type]


def load_half(path: Path, **options: object) -> OnnxEngine:
    with as_for_cuda():
        return load(path, **options)


def scored(engine: OnnxEngine) -> Logits:
    """Of a prompt, a token and a draft behind it."""
    return np.concatenate([engine.forward(Batch.chain(part)).copy() for part in (IDS[:40], IDS[40:41], IDS[41:48])])


@pytest.mark.parametrize(
    ("model", "tolerance"), [("plain_path", HALF), ("onnx_path", CODES), ("four_bit_path", CODES)], ids=str
)
def test_logits_are_those_of_the_graph_as_exported_within_half_precision(model, tolerance, request):
    path = request.getfixturevalue(model)
    with load(path) as exported, load_half(path) as engine:
        told = " ".join(set(engine.facts.notes) - set(exported.facts.notes))
        assert "float16" in told
        assert engine.facts.kv_bytes_per_token * 2 == exported.facts.kv_bytes_per_token
        wanted = scored(exported)
        assert difference(scored(engine), wanted) < tolerance


@pytest.mark.parametrize("case", CASES)
def test_every_architecture_can_be_adapted(case, tmp_path):
    """Queries, keys and values apart or together; biases, norms of heads, windows, tables of their own."""
    path = graph(tiny_files(tmp_path)(case), tmp_path / "graph")
    ids = TOKENS % 299  # of the smallest vocabulary
    wanted = logits(path, ids)
    with as_for_cuda():
        assert difference(logits(path, ids), wanted) < HALF


@pytest.mark.parametrize("limit", [("LARGEST_HEAD", 32), ("HEAD_STEP", 48)])
def test_heads_that_the_attention_does_not_take_are_named(onnx_path, limit, monkeypatch):
    monkeypatch.setattr(engines, *limit)
    with pytest.raises(CapabilityError, match=r"at most \d+ values, in multiples of \d+; this model's have 64"):
        load_half(onnx_path)


@pytest.mark.parametrize("model", ["onnx_path", "four_bit_path"])
def test_texts_are_those_without_drafts(model, request):
    path = request.getfixturevalue(model)
    with as_for_cuda():
        loaded = edgespec.load(path, provider="cpu", reproducible=True, context_length=200)
    with loaded as target:
        assert target.target.facts.pinned_class is not None
        found = assert_same_text(target, [("ngram", 4), ("suffix", 7)], num_tokens=16)
    assert sum(each.drafted_tokens for each in found.values()) > 0


def test_a_plan_for_cuda_counts_two_bytes_of_a_value(onnx_path):
    use = ModelUse(context_length=200, max_sequences=3, reproducible=True)
    here, there = (footprint(onnx_path, replace(use, provider=name)) for name in ("cpu", "cuda"))
    with load(onnx_path) as exported:
        own = here.packed - there.packed + here.mapped + here.cache + here.compute
        assert own - there.device == 3 * 200 * exported.facts.kv_bytes_per_token // 2


def test_auto_passes_over_a_device_that_was_never_run(tiny_graph_path, monkeypatch):
    def opened(*given: Any, provider: str, **options: Any) -> Any:
        tried.append(provider)
        if provider != "cpu":
            raise CapabilityError("what it lacks")
        return open_session(*given, provider=provider, **options)

    tried, open_session = list[str](), library.open_session
    monkeypatch.setattr(library, "installed_providers", lambda: ("cuda", "cpu"))
    monkeypatch.setattr("edgespec.engines.onnx.engine.open_session", opened)
    with OnnxEngine.load(tiny_graph_path, context_length=200, threads=1, reproducible=False) as engine:
        # CUDA, for which attention would be cast, was never run so: only for those who ask for it
        assert engine.facts.device == "cpu" and tried == ["cpu"]
    with pytest.raises(CapabilityError, match="lacks"):
        OnnxEngine.load(tiny_graph_path, context_length=200, threads=1, reproducible=False, provider="cuda")


def test_classes_belong_to_the_device_that_runs(tiny_graph_path, monkeypatch):
    """Another device under the same provider has classes of its own."""

    def key(identity: str) -> str:
        monkeypatch.setattr("edgespec.engines.onnx.engine.device_identity", lambda _provider: identity)
        with load(tiny_graph_path, reproducible=True) as engine:
            return engine.facts.class_key

    assert len({key(""), key("a GPU"), key("another")}) == 3

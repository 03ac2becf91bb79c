"""Devices whose kernels are wrong without saying so are found by trying; and a WebGPU device, where there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.engines.onnx import OnnxEngine, opening, sessions
from edgespec.engines.onnx.devices import check_device
from edgespec.engines.onnx.graph import Graph
from edgespec.engines.onnx.library import failures_of_library, installed_providers, library, load_cuda
from edgespec.engines.onnx.sessions import NO_FALLBACK, reason
from edgespec.errors import CapabilityError
from edgespec.types import Batch, Logits

ROWS = 64
NEEDS_WEBGPU = pytest.mark.skipif(
    "webgpu" not in installed_providers(), reason="no WebGPU device, or no package onnxruntime-ep-webgpu"
)


def load(path: Path, provider: str = "cpu", **options: object) -> OnnxEngine:
    settings = {"context_length": 200, "max_sequences": 2, "max_batch": ROWS, "reproducible": False} | options
    return OnnxEngine.load(path, threads=TEST_THREADS, provider=provider, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("least", [32, 1])
def test_a_device_that_computes_wide_passes_wrongly_is_refused(tiny_graph_path, least, monkeypatch):
    with load(tiny_graph_path) as engine:
        check_device(engine)
        forward = engine.forward

        def wrong(batch: Batch) -> Logits:
            return np.roll(forward(batch), batch.width if batch.width >= least else 0, axis=1)

        monkeypatch.setattr(engine, "forward", wrong)
        with pytest.raises(CapabilityError, match="gives wrong results for this model: use "):
            check_device(engine)
        assert engine.length() == 0


def test_auto_takes_the_next_device_where_one_lacks_something(tiny_graph_path, monkeypatch):
    def without_room_for_its_heads(graph: Graph, provider: str, _head_size: int) -> Graph:
        tried.append(provider)
        if provider != "cpu":
            raise CapabilityError("heads of 12 values")
        return graph

    tried = list[str]()
    monkeypatch.setattr(sessions, "installed_providers", lambda: ("cuda", "webgpu", "cpu"))
    monkeypatch.setattr(opening, "adapted", without_room_for_its_heads)
    with load(tiny_graph_path, "auto") as engine:
        # CUDA, for which attention would be cast, was never run so: only for those who ask for it
        assert engine.facts.device == "cpu" and tried[-1] == "cpu" and tried[0] == "webgpu"
    with pytest.raises(CapabilityError, match="12 values"):
        load(tiny_graph_path, "cuda")


def test_a_graph_that_cuda_runs_in_part_only_is_explained(tiny_graph_path):
    """The words are ONNX Runtime's own: a session that may not use the processor, and has nothing else."""
    options = library().SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    with pytest.raises(failures_of_library(), match=NO_FALLBACK) as refused:
        library().InferenceSession(str(tiny_graph_path), options, providers=[])
    graph, said = tiny_graph_path.read_bytes(), str(refused.value)
    assert reason("webgpu", graph, said) == said
    if not load_cuda():
        told = reason("cuda", graph, said)
        assert NO_FALLBACK in told and "llama.cpp" in told
        assert reason("cuda", graph, "something else") == "something else"


@NEEDS_WEBGPU
def test_webgpu_scores_as_the_processor_does(tiny_graph_path):
    ids = np.random.default_rng(0).integers(0, 299, 40).astype(np.int32)
    with load(tiny_graph_path) as cpu, load(tiny_graph_path, "webgpu") as gpu:
        assert gpu.facts.device == "webgpu"
        for first, last in ((0, 12), (12, 13), (13, 14), (14, 17)):
            wanted, found = (engine.forward(Batch.chain(ids[first:last])).copy() for engine in (cpu, gpu))
            np.testing.assert_allclose(found, wanted, atol=1e-3 * wanted.std())


@NEEDS_WEBGPU
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_texts_of_webgpu_are_those_without_drafts(tiny_graph_path, temperature):
    sampling, options = Sampling(temperature=temperature, seed=3), GenerateOptions(max_tokens=24, ignore_eos=True)
    ids = np.random.default_rng(0).integers(0, 299, 12).tolist() * 2
    with edgespec.load(tiny_graph_path, provider="webgpu", reproducible=True, context_length=200) as model:
        assert model.target.facts.device == "webgpu" and model.target.facts.pinned_class is not None
        plain, *drafted = [
            model.generate(ids, sampling, replace(options, drafter=drafter, draft_length=length))
            for drafter, length in (("none", 0), ("ngram", 4), ("suffix", 7))
        ]
    assert sum(each.stats.drafted_tokens for each in drafted) > 0
    assert [each.token_ids for each in drafted] == [plain.token_ids] * 2
    assert [each.logprobs for each in drafted] == [plain.logprobs] * 2


def test_classes_belong_to_the_device_that_runs(tiny_graph_path, monkeypatch):
    """Another device under the same provider has classes of its own."""

    def key(identity: str) -> str:
        monkeypatch.setattr(opening, "device_identity", lambda _provider: identity)
        with load(tiny_graph_path, reproducible=True) as engine:
            return engine.facts.class_key

    assert len({key(""), key("a GPU"), key("another")}) == 3

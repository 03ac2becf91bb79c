"""The early exit: first layers and head of a GGUF on the kernels as its draft model, over the same tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.model import EarlyExitDrafter
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx.footprint import footprint
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.errors import CapabilityError, ConfigError
from edgespec.types import Batch
from lossless import PROMPTS
from needs import NEEDS_KERNELS

TARGET, LAYERS = DEMO / "demo-target-q8_0.gguf", 4
pytestmark = NEEDS_KERNELS


@pytest.fixture(scope="module")
def target() -> Iterator[KernelEngine]:
    with OnnxEngine.load(TARGET, context_length=200, threads=TEST_THREADS, hidden_states=True, state_layers=(4,)) as it:
        assert isinstance(it, KernelEngine)
        yield it


def test_it_is_the_state_before_a_layer_through_norm_and_head(target: KernelEngine) -> None:
    """The same tiles, which are neither packed nor counted again; its cache is its own."""
    ids = np.random.default_rng(0).integers(0, target.vocabulary.size, 30).astype(np.int32)
    target.forward(Batch.chain(ids))
    states = target.hidden_states()[:, : target.hidden_states().shape[1] // 2].astype(np.float64)
    with target.first_layers(LAYERS) as engine:
        assert engine.source._tiles is target.source._tiles  # type: ignore[attr-defined]
        found = engine.forward(Batch.chain(ids)).copy()
        assert engine.length() == 30 and target.length() == 30
        assert 9 * engine.facts.kv_bytes_per_token == LAYERS * target.facts.kv_bytes_per_token
        assert engine.facts.weight_bytes < target.facts.weight_bytes
    tensors = edgespec_tensors()
    normed = states / np.sqrt((states**2).mean(axis=1, keepdims=True) + 1e-5) * tensors["output_norm.weight"]
    wanted = normed @ tensors["token_embd.weight"].T
    assert np.abs(found - wanted).max() < 0.05 * wanted.std()
    planned = [footprint(TARGET, ModelUse(200, exit_layer=layers)) for layers in (None, LAYERS)]
    assert planned[0].packed < planned[1].packed < 1.02 * planned[0].packed + (8 << 20)
    assert planned[1].cache > 1.3 * planned[0].cache


def edgespec_tensors() -> dict[str, np.ndarray]:
    import gguf

    found = {tensor.name: tensor for tensor in gguf.GGUFReader(TARGET).tensors}
    return {
        name: gguf.quants.dequantize(found[name].data, found[name].tensor_type).astype(np.float64)
        for name in ("output_norm.weight", "token_embd.weight")
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_that_of_the_target_alone(temperature: float) -> None:
    with edgespec.load("demo", exit_layer=LAYERS, threads=TEST_THREADS) as model:
        drafter = model.drafters.drafters["early-exit"]
        assert isinstance(drafter, EarlyExitDrafter)
        assert 0 < drafter.bytes_used < model.target.facts.kv_bytes_per_token * model.target.facts.context_length
        options = GenerateOptions(max_tokens=48, drafter="none", ignore_eos=True)
        for seed, prompt in enumerate(PROMPTS[:2]):
            ids, sampling = model.encode(prompt), Sampling(temperature=temperature, seed=seed)
            wanted = model.generate(ids, sampling, options)
            for name, length in (("early-exit", 1), ("early-exit", 6), ("auto", "auto")):
                found = model.generate(ids, sampling, replace(options, drafter=name, draft_length=length))
                assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs), (name, length)
                assert length == "auto" or found.stats.accepted_tokens > 0


def test_an_exit_is_the_small_model_of_a_hierarchy() -> None:
    medium = DEMO / "demo-medium-q8_0.gguf"
    with edgespec.load(TARGET, medium=medium, exit_layer=LAYERS, threads=TEST_THREADS) as model:
        drafter = model.drafters.drafters["hierarchical"]
        assert isinstance(drafter, HierarchicalDrafter) and drafter._small is model.drafters.drafters["early-exit"]
        sampling, options = (
            Sampling(temperature=0.8, seed=3),
            GenerateOptions(max_tokens=40, drafter="none", ignore_eos=True),
        )
        plain = model.generate(PROMPTS[1], sampling, options)
        found = model.generate(PROMPTS[1], sampling, replace(options, drafter="hierarchical", draft_length=5))
        assert found.token_ids == plain.token_ids and found.stats.accepted_tokens > 0


def test_an_exit_that_is_not_there_is_refused(onnx_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"needs an early exit of a GGUF target.*give exit_layer="):
        edgespec.load("demo", drafter="early-exit")
    for given in ({"model": "demo", "engine": "llamacpp"}, {"model": str(onnx_path)}):
        with pytest.raises(CapabilityError, match="needs an early exit of a GGUF target for a target on onnx"):
            edgespec.load(**given, exit_layer=3)
    for layers, said in ((0, "of at least 1"), (9, r"allows 1\.\.8")):
        with pytest.raises(ConfigError, match=said):
            edgespec.load("demo", exit_layer=layers)

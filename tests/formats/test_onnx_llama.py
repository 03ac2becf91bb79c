"""Graphs written without an exporter: bit for bit what the exporter's graph computes; strange ones are refused.

The model is the demo target as it ships, read as float32.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from demo import DEMO, TEST_THREADS
from edgespec.engines.onnx import OnnxEngine
from edgespec.errors import ModelFileError
from edgespec.formats.onnx.forms import WholeNumbers
from edgespec.formats.onnx.llama import rotary_tables, write_llama
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.formats.onnx.w8a8 import quantise_rows
from edgespec.types import Batch
from llama_graph import LlamaGraph
from plain_demo import plain_demo

SHIPPED = DEMO / "onnx" / "target"
LAYERS = 9


def quantise_columns(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes [K, N] and scales [N] of weights [K, N]."""
    scales = np.abs(weights).max(axis=0) / np.float32(127)
    return np.rint(weights / scales).astype(np.int8), scales


class Quantised:
    """Weights of `graph`, each matrix by itself as an export quantises it."""

    def __init__(self, graph: LlamaGraph) -> None:
        self._graph = graph

    def vector(self, name: str) -> NDArray[np.float32]:
        return self._graph.weights(name)

    def product(self, name: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        return quantise_columns(self._graph.weights(name).T)

    def embedding(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        return quantise_rows(self._graph.weights("model.embed_tokens.weight"), 64)


def shipped_tables() -> tuple[Any, ...]:
    """Rotary tables as the exporter computed them, in other last bits than numpy."""
    graph = onnx.load(SHIPPED / "model.onnx").graph
    found = {tensor.name: tensor for tensor in graph.initializer}
    return tuple(numpy_helper.to_array(found[name]) for name in ("cos_cache", "sin_cache"))


def written(folder: Path, *, is_unsigned: bool = False) -> Path:
    """The demo target as this package's writer has it."""
    shutil.copytree(SHIPPED, folder)
    graph = LlamaGraph(SHIPPED)
    form = partial(WholeNumbers, Quantised(graph), is_unsigned=is_unsigned)
    write_llama(folder, LlamaConfig.from_hub(graph.config), form)
    return folder / "model.onnx"


def logits(path: Path, ids: NDArray[np.int32], **options: Any) -> NDArray[np.float32]:
    wanted = {"context_length": 128, "threads": TEST_THREADS, "reproducible": False, **options}
    with OnnxEngine.load(path, **wanted) as engine:
        return engine.forward(Batch.chain(ids)).copy()


IDS = np.random.default_rng(3).integers(3, 4000, 40).astype(np.int32)


def test_a_written_graph_computes_what_the_floats_do(tmp_path: Path):
    exact = logits(plain_demo(SHIPPED, tmp_path / "plain"), IDS)
    path = written(tmp_path / "target")
    found = logits(path, IDS)
    assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.995
    alone = logits(path, IDS, reproducible=True)
    np.testing.assert_array_equal(logits(path, IDS, reproducible=True, exit_layer=4), alone)


def test_rotary_tables_are_the_exporters_but_for_a_last_bit():
    config = LlamaConfig.from_hub(json.loads((SHIPPED / "config.json").read_text(encoding="utf-8")))
    for ours, theirs in zip(rotary_tables(config), shipped_tables(), strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1.2e-7)
    further = rotary_tables(replace(config, rope_theta=5e5, max_positions=3, head_dim=4))[0]
    np.testing.assert_allclose(further[2], [np.cos(2), np.cos(2 / np.sqrt(5e5))], rtol=1e-6)


def test_unsigned_weights_give_the_same_bits(tmp_path: Path):
    signed, unsigned = written(tmp_path / "signed"), written(tmp_path / "unsigned", is_unsigned=True)
    np.testing.assert_array_equal(logits(unsigned, IDS), logits(signed, IDS))


def test_every_size_comes_from_the_configuration(tmp_path: Path):
    """Other numbers of heads, of positions, another width: the graph opens and runs."""
    config = LlamaConfig(96, 160, 2, 6, 2, 16, 4096, 64, 1e-6, 5e5)
    random = np.random.default_rng(0)
    sizes = {"q": (96, 96), "k": (96, 32), "v": (96, 32), "o": (96, 96), "gate": (96, 160), "up": (96, 160)}
    sizes |= {"down": (160, 96), "lm_head": (96, 4096)}

    class Random:
        def vector(self, name: str) -> NDArray[np.float32]:
            return np.ones(96, np.float32)

        def product(self, name: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
            kind = name.removesuffix(".weight").removesuffix("_proj").rpartition(".")[2]
            return quantise_columns(random.standard_normal(sizes[kind], np.float32))

        def embedding(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
            return quantise_rows(random.standard_normal((4096, 96), np.float32), 32)

    parts: list[tuple[int, int]] = []
    write_llama(tmp_path, config, partial(WholeNumbers, Random()), lambda done, total: parts.append((done, total)))
    assert parts == [(1, 4), (2, 4), (3, 4), (4, 4)]
    hub = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(hub), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / name, tmp_path / name)
    found = logits(tmp_path / "model.onnx", IDS, context_length=64)
    assert found.shape == (len(IDS), 4096) and np.isfinite(found).all() and found.std() > 0.1
    again = logits(tmp_path / "model.onnx", IDS[:20], context_length=64)
    np.testing.assert_allclose(again, found[:20], atol=1e-2)  # what comes later changes nothing before


def test_the_reader_gives_the_floats_of_the_shipped_graph(tmp_path: Path):
    path = plain_demo(SHIPPED, tmp_path / "plain")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    graph = LlamaGraph(SHIPPED)
    joined = [graph.weights(f"model.layers.8.self_attn.{kind}_proj.weight") for kind in "qkv"]
    assert [part.shape for part in joined] == [(256, 256), (128, 256), (128, 256)]
    np.testing.assert_array_equal(np.concatenate(joined).T, stored["/model/layers.8/attn/qkv_proj/MatMul_Q8.weight"])
    for name, theirs in (("o_proj", "attn/o_proj"), ("down_proj", "mlp/down_proj")):
        part = theirs.partition("/")[0].replace("attn", "self_attn")
        found = graph.weights(f"model.layers.3.{part}.{name}.weight")
        np.testing.assert_array_equal(found.T, stored[f"/model/layers.3/{theirs}/MatMul_Q8.weight"])
    head = stored["/lm_head/MatMul_Q8.weight"]
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        np.testing.assert_array_equal(graph.weights(name).T, head)
    for ours, theirs in (
        ("model.norm.weight", f"model.layers.{LAYERS}.final_norm_layernorm.weight"),
        ("model.layers.2.input_layernorm.weight", "model.layers.2.input_layernorm.weight"),
    ):
        np.testing.assert_array_equal(graph.weights(ours), stored[theirs])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "only a Llama with silu"),
        ({"hidden_act": "gelu"}, "only a Llama with silu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 512}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary positions of the kind 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary positions of the kind 'linear'"),
        ({"hidden_size": None}, "incomplete or damaged"),
        ({"num_attention_heads": 0, "head_dim": None}, "incomplete or damaged"),
    ],
)
def test_other_llamas_are_refused(changes: dict[str, Any], message: str):
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(ModelFileError, match=message):
        LlamaConfig.from_hub(config | changes)


def test_configurations_of_both_transformers_are_read():
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    newer = {key: value for key, value in config.items() if key not in ("rope_theta", "head_dim")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    assert LlamaConfig.from_hub(newer) == LlamaConfig.from_hub(config)

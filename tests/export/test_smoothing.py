"""Smoothed weights compute the same, and outliers no longer cost a w8a8 graph its accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("gguf", reason="export needs the package gguf: scripts/run.py install export")

from demo import DEMO
from edgespec.engines.onnx import OnnxEngine
from edgespec.export.onnx import from_gguf, writer
from edgespec.export.onnx.from_gguf import convert_gguf, open_gguf
from edgespec.export.onnx.gguf_weights import GgufWeights
from edgespec.export.onnx.smoothing import SmoothedWeights
from edgespec.formats.onnx.forms import Plain, RowWeights
from edgespec.formats.onnx.hidden_scales import written
from edgespec.formats.onnx.llama import write_llama
from edgespec.types import Batch
from tiny_graphs import CASES, difference, graph, logits, mean_kl, tiny_files

Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return tiny_files(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("case", CASES)
def test_smoothing_changes_no_result_in_float32(case: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """With large channels where the model has none, so that the scales are far from 1."""
    plain = graph(tiny(case), tmp_path / "plain")
    model = open_gguf(tiny(case))
    weights, config = GgufWeights(model), model.config
    random = np.random.default_rng(3)
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    names = [f"model.layers.{n}.{part}_proj.weight" for n in range(config.num_layers) for part in parts]
    largest = {name: np.exp(3 * random.standard_normal(weights.shape(name)[1])).astype(np.float32) for name in names}
    largest["lm_head.weight"] = np.exp(random.standard_normal(config.hidden_size)).astype(np.float32)
    smoothed = SmoothedWeights(weights, config, largest)
    folder = tmp_path / "smoothed"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((plain.parent / name).read_bytes())
    assert smoothed.hidden_scales is not None
    write_llama(folder, config, partial(Plain, smoothed), properties=written(smoothed.hidden_scales))
    changed = max(float(np.abs(smoothed.vector(n) / weights.vector(n)).max()) for n in ("model.norm.weight",))
    assert changed > 1.5, "the scales of this test must matter"
    assert difference(logits(folder / "model.onnx"), logits(plain)) < 2e-4
    assert difference(states(folder / "model.onnx"), states(plain)) < 2e-4, "heads read the model's own states"


def states(path: Path) -> Floats:
    """Hidden states [rows, width] of a few tokens, as heads get them."""
    with OnnxEngine.load(path, context_length=32, threads=1, hidden_states=True, reproducible=False) as engine:
        engine.give_hidden_states(True)
        engine.forward(Batch.chain(range(3, 12)))
        return engine.hidden_states().copy()


class WithOutliers:
    """The demo's weights with some channels of all norms a hundred times larger; what reads them makes up for it."""

    hidden_scales = None  # as of what is not smoothed

    def __init__(self, weights: RowWeights) -> None:
        self._weights, self.is_tied = weights, weights.is_tied
        self.shape = weights.shape
        width = weights.shape("model.embed_tokens.weight")[1]
        self._factors = np.ones(width, np.float32)
        self._factors[:: width // 4] = 100

    def vector(self, name: str) -> Floats:
        found = self._weights.vector(name)
        return found * self._factors if name.endswith("norm.weight") and found.size == self._factors.size else found

    def rows(self, name: str) -> Iterator[Floats]:
        reads_norm = any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"))
        for rows in self._weights.rows(name):
            yield rows / self._factors if reads_norm else rows


def test_outliers_that_would_ruin_w8a8_are_smoothed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_gguf(DEMO / "demo-target-q8_0.gguf")
    monkeypatch.setattr(from_gguf, "GgufWeights", lambda model: WithOutliers(GgufWeights(model)))

    def made(name: str, quant: str) -> Floats:
        (tmp_path / name).mkdir()
        return logits(convert_gguf(source, tmp_path / name, quant))

    exact, smoothed = made("float", "fp32"), made("smoothed", "w8a8")
    monkeypatch.setattr(writer, "smoothed", lambda config, weights, *rest, **named: weights)
    unsmoothed = made("unsmoothed", "w8a8")
    assert mean_kl(smoothed, exact) < 0.01
    assert mean_kl(unsmoothed, exact) > 20 * mean_kl(smoothed, exact)

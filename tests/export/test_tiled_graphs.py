"""Exports for our own kernels: their tiles hold the very blocks of a GGUF, or those that llama.cpp would make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx import graph as graphs
from edgespec.engines.onnx.footprint import footprint
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.export.onnx import writer
from edgespec.formats.manifest import read_pair
from edgespec.formats.onnx import DATA
from edgespec.formats.onnx.tiles import DOMAIN, LAYOUT_VERSION
from edgespec.types import Batch
from gguf_conversions import answer, export
from needs import NEEDS_KERNELS, NEEDS_LLAMA
from tiny_checkpoints import write_checkpoint
from tiny_graphs import IDS, Floats, export_gguf, graph

TARGET, CHECKPOINT = DEMO / "demo-target-q8_0.gguf", DEMO / "hf" / "target"

pytestmark = [pytest.mark.usefixtures("one_thread"), NEEDS_KERNELS]


def logits(path: Path) -> Floats:
    """Of the file on our kernels, whether it is an export or a GGUF."""
    with OnnxEngine.load(path, context_length=64, threads=TEST_THREADS) as engine:
        assert engine.facts.pinned_class  # reproducible by default
        return engine.forward(Batch.chain(IDS)).copy()


def data_of(path: Path) -> bytes:
    return (path.parent / DATA).read_bytes()


def test_the_blocks_of_a_gguf_are_kept(tmp_path: Path):
    path = graph(TARGET, tmp_path / "made", "q8_0")
    np.testing.assert_array_equal(logits(path), logits(TARGET))
    assert len(data_of(path)) < 1.1 * TARGET.stat().st_size  # a tied head is stored once


@NEEDS_LLAMA
@pytest.mark.parametrize("case", ["demo", "llama", "qwen2", "qwen3", "gemma3"])
def test_q4_k_m_is_that_of_llama_cpp(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows of 256 and rows of 64. A file that has these blocks needs no quantiser."""
    source, theirs = CHECKPOINT if case == "demo" else write_checkpoint(tmp_path / case, case), tmp_path / "theirs.gguf"
    export_gguf(source, theirs, "q4_k_m", threads=TEST_THREADS)
    ours = graph(source, tmp_path / "ours", "q4_k_m")
    np.testing.assert_allclose(logits(ours), logits(theirs), atol=2e-6)  # a GGUF has Gemma's scales in 32 bits
    monkeypatch.setattr("edgespec.installation.has_engine", lambda _: False)
    kept = graph(theirs, tmp_path / "kept", "q4_k_m")
    assert data_of(kept) == data_of(ours)


def test_a_pair_runs_and_its_plan_counts_the_mapped_file(tmp_path: Path):
    result = export(TARGET, tmp_path / "pair", "--quant", "q8_0")
    assert result.exit_code == 0, result.output
    pair = read_pair(tmp_path / "pair")
    assert pair.figures["check"]["target"]["onnx"]["mean_kl"] < 0.005
    assert answer(tmp_path / "pair")["text"] == answer(TARGET)["text"]
    files = pair.target.stat().st_size + len(data_of(pair.target))
    assert footprint(pair.target, ModelUse(context_length=2048)).mapped == files
    with edgespec.load(tmp_path / "pair") as runtime:
        assert runtime.reproducible


def test_tiles_of_another_layout_are_refused(tmp_path: Path):
    path = graph(TARGET, tmp_path / "made", "q8_0")
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        for item in node.attribute:
            if node.domain == DOMAIN and item.name == "layout":
                item.i = LAYOUT_VERSION + 1
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelFileError, match=f"tiles of layout {LAYOUT_VERSION + 1}, .* export it again"):
        OnnxEngine.load(path)


def test_without_the_kernels_it_is_said_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = graph(TARGET, tmp_path / "made", "q8_0")
    for module in (graphs, writer):
        monkeypatch.setattr(module, "library_path", lambda: None)
        monkeypatch.setattr(module, "why_missing", lambda: "they are not built: run this")
    opened: list[Callable[[], object]] = [lambda: OnnxEngine.load(path), lambda: footprint(path, ModelUse())]
    for call in (*opened, lambda: graph(TARGET, tmp_path / "none", "q8_0")):
        with pytest.raises(CapabilityError, match=r"edgespec.s own kernels.* not built: run this\. Or export .*int8"):
            call()
    result = export(CHECKPOINT, tmp_path / "pair", "--quant", "q8_0")
    assert result.exit_code != 0 and "they are not built: run this" in result.stderr
    assert not (tmp_path / "pair").exists()


def test_without_llama_cpp_another_type_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("edgespec.installation.has_engine", lambda engine: engine != "llamacpp")
    for source in (CHECKPOINT, TARGET):
        result = export(source, tmp_path / "pair", "--quant", "q4_k_m", "--no-check")
        assert result.exit_code != 0
        assert "needs llama.cpp" in result.stderr and "or export " in result.stderr

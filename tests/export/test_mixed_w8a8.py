"""w8a8 with some matrices in groups: nearer to the float32 graph, a tied table stored once, bad names refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("gguf", reason="export needs the package gguf: scripts/run.py install export")

import onnx

from demo import DEMO
from edgespec.errors import ConfigError
from edgespec.export.onnx.convert import GROUPED
from edgespec.export.onnx.from_gguf import convert_gguf, open_gguf
from edgespec.export.request import ExportRequest, parse_grouped
from edgespec.formats.onnx import WHOLE_PRODUCT
from edgespec.formats.onnx.forms import GROUPABLE
from tiny_graphs import logits, mean_kl

SOURCE = DEMO / "demo-target-q8_0.gguf"


def made(folder: Path, quant: str = "w8a8", grouped: tuple[str, ...] = ()) -> Path:
    folder.mkdir()
    return convert_gguf(open_gguf(SOURCE), folder, quant, grouped=grouped)


def kinds(path: Path, operator: str) -> set[str]:
    """The matrices that an operator multiplies by, by the last part of their names."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    names = (node.name.split("/MatMul")[0] for node in nodes if node.op_type == operator)
    return {name.rpartition("/")[2] for name in names}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("graphs")
    return {
        "float": made(folder / "float", "fp32"),
        "none": made(folder / "none"),
        "default": made(folder / "default", grouped=GROUPED),
        "head": made(folder / "head", grouped=("lm_head",)),
        "all": made(folder / "all", grouped=GROUPABLE),
    }


def test_the_matrices_that_are_named_are_in_groups_and_no_others(graphs: dict[str, Path]) -> None:
    everything = {"qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    for name, grouped in {"none": set(), "default": set(GROUPED), "head": {"lm_head"}, "all": everything}.items():
        assert kinds(graphs[name], "MatMulNBits") == grouped
        assert kinds(graphs[name], WHOLE_PRODUCT) == everything - grouped


def test_groups_lose_less_of_a_model(graphs: dict[str, Path]) -> None:
    exact = logits(graphs["float"])
    loss: dict[str, float] = {name: mean_kl(logits(graphs[name]), exact) for name in ("none", "default", "all")}
    assert loss["all"] < loss["default"] < loss["none"], loss


def test_a_tied_head_in_groups_is_stored_once(graphs: dict[str, Path]) -> None:
    sizes = {name: (path.parent / "model.onnx.data").stat().st_size for name, path in graphs.items()}
    table = open_gguf(SOURCE).config
    assert sizes["none"] - sizes["head"] > 0.9 * table.vocab_size * table.hidden_size


def test_a_lookup_in_the_head_gives_the_embedding(graphs: dict[str, Path]) -> None:
    """The first tokens of a text say most about the embedding: one that is off would ruin them."""
    exact: NDArray[np.float32] = logits(graphs["float"])
    assert mean_kl(logits(graphs["head"]), exact) < 0.01


def test_bad_lists_are_refused_by_name() -> None:
    assert parse_grouped("none") == ()
    assert parse_grouped("lm_head, down_proj") == ("lm_head", "down_proj")
    with pytest.raises(ConfigError, match=r"'down_porj' is not known.*down_proj.*allowed: .*lm_head"):
        parse_grouped("down_porj")
    with pytest.raises(ConfigError, match="give --to onnx --quant w8a8"):
        ExportRequest("model", Path("out"), {"onnx": "w8a8"}, grouped=(), exporter="builder")
    with pytest.raises(ConfigError, match="give --to onnx --quant w8a8"):
        ExportRequest("model.gguf", Path("out"), {"onnx": "int8"}, grouped=())

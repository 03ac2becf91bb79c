"""EAGLE-3 heads as their authors publish them, for ONNX targets: exact against the definition, and the text stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eagle3 as script
import edgespec
from demo import DEMO, TEST_THREADS
from eagle3 import check_heads, plan_head, write_heads
from edgespec import GenerateOptions
from edgespec.engines.base import Engine
from edgespec.engines.onnx import OnnxEngine
from edgespec.errors import ModelFileError
from edgespec.export.check import ExportRefused
from edgespec.formats.head_file import HeadFile
from lossless import assert_same_text
from tiny_checkpoints import LLAMA3_SCALING
from tiny_checkpoints import write_checkpoint as write_tiny
from tiny_graphs import graph
from tiny_head import write_checkpoint

TARGET = DEMO / "hf" / "target"
GRAPH = DEMO / "onnx" / "target" / "model.onnx"
VARIANTS: dict[str, dict[str, Any]] = {
    "own tables": {},
    "all tokens": {"drafted": None},
    "the target's embedding": {"owns": ("lm_head.weight",)},
    "all of the target's tables": {"drafted": None, "owns": ()},
    "normed residual": {"config": {"norm_before_residual": True}},
    "other layers": {"config": {"eagle_aux_hidden_state_layer_ids": [6, 1, 3]}},
    "llama 3 rope": {"config": {"rope_scaling": LLAMA3_SCALING}},
    "normed features": {
        "config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [4, 0, 8]},
        "tensors": {"input_norm.weight": np.linspace(0.5, 1.5, 3 * 256, dtype=np.float32)},
    },
}

pytestmark = pytest.mark.usefixtures("one_thread")


def opened(layers: tuple[int, ...], path: Path = GRAPH, context_length: int = 256) -> Engine:
    return OnnxEngine.load(
        path,
        context_length=context_length,
        threads=TEST_THREADS,
        reproducible=False,
        hidden_states=True,
        state_layers=layers,
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_is_its_definition(variant: str, tmp_path: Path):
    head = write_checkpoint(tmp_path / "head", TARGET, **VARIANTS[variant])
    write_heads(head, TARGET, opened, tmp_path / "heads.npz")
    found = check_heads(head, TARGET, opened, tmp_path / "heads.npz")
    assert found["as floats"].mean_kl < 2e-5
    assert found["as stored"].mean_kl < 0.01 and found["as stored"].top1_agreement > 0.97
    assert found["as stored"].num_tokens > 80


def test_targets_of_another_architecture(tmp_path: Path):
    """One whose norms add one and whose layers have windows; the head takes all tables from it."""
    folder = write_tiny(tmp_path / "gemma", "gemma3", num_hidden_layers=8, layer_types=["full_attention"] * 8)
    made = graph(folder, tmp_path / "made")
    head = write_checkpoint(tmp_path / "head", folder, drafted=None, owns=())

    def target(layers: tuple[int, ...]) -> Engine:
        return opened(layers, made, 128)

    write_heads(head, folder, target, tmp_path / "heads.npz")
    assert not check_heads(head, folder, target, tmp_path / "heads.npz")["as floats"].complaint(script.FLOATS)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"config": {"num_hidden_layers": 2}}, "is not an EAGLE-3 head"),
        ({"config": {"hidden_act": "gelu"}}, "hidden_act 'gelu'"),
        ({"config": {"target_hidden_size": 512}}, "a target of width 512"),
        ({"config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, r"3 different ones of 0\.\.8"),
        ({"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "123"}}}, r"3 different ones of 0\.\.8"),
        ({"config": {"rope_scaling": {"rope_type": "dynamic"}}}, "rotary scaling 'dynamic'"),
        ({"config": {"norm_before_fc": True}}, "lacks 1 tensors"),
        ({"config": {"intermediate_size": 95}}, "imply"),
        ({"tensors": {"midlayer.hidden_norm.weight": None}}, "state_norm"),
        ({"tensors": {"midlayer.extra.weight": np.ones(3, np.float32)}}, "midlayer.extra.weight has no place"),
        ({"tensors": {"d2t": np.full(500, 4096, np.int64)}}, "must name different tokens"),
        ({"tensors": {"d2t": np.ones(500, np.float32)}}, "a list of I64"),
        ({"tensors": {"norm.weight": np.full(256, np.inf, np.float32)}}, "infinity"),
        ({"owns": ("embed_tokens.weight",)}, "no lm_head"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_no_head_is_refused(tmp_path: Path, options: dict[str, Any], reason: str):
    folder = write_checkpoint(tmp_path / "hf", TARGET, **options)
    with pytest.raises(ModelFileError, match=reason):
        write_heads(folder, TARGET, opened, tmp_path / "heads.npz")
    assert not list(tmp_path.glob("*.npz*"))


def test_the_names_of_speculators(tmp_path: Path):
    """The layer under another name with its settings nested."""
    folder = write_checkpoint(tmp_path / "hf", TARGET)
    plan = plan_head(folder, TARGET)
    renamed = {source.replace("midlayer.", "layers.0."): plan.weights(name) for name, source in plan.tensors.items()}
    tensors = {**dict.fromkeys(plan.tensors.values()), **renamed}
    config = {"transformer_layer_config": {"num_hidden_layers": 1}, "num_hidden_layers": None}
    other = plan_head(write_checkpoint(tmp_path / "other", TARGET, tensors=tensors, config=config), TARGET)
    assert all(np.array_equal(plan.weights(name), other.weights(name)) for name in plan.tensors)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("eagle3") / "head", TARGET, drafted=800)


@pytest.fixture(scope="module")
def heads(head: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eagle3") / "heads.npz"
    write_heads(head, TARGET, opened, path)
    return path


@pytest.fixture(scope="module")
def model(heads: Path) -> Iterator[edgespec.Model]:
    with edgespec.load(str(GRAPH), heads=heads, reproducible=True, threads=1, context_length=512) as loaded:
        yield loaded


def test_text_does_not_depend_on_the_head(model: edgespec.Model):
    stats = assert_same_text(model, [("eagle", length) for length in (1, 4, "auto")])
    assert stats["eagle", 4].drafted_tokens > 240


def test_the_script_makes_files_that_draft(head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "heads.npz"
    assert script.main([str(head), str(TARGET), "-o", str(output), "--model", str(GRAPH)]) == 0
    assert "as stored {" in capsys.readouterr().out
    options = GenerateOptions(max_tokens=20, drafter="eagle", draft_length=3, ignore_eos=True)
    with edgespec.load("demo", engine="onnx", heads=output, threads=1, context_length=256) as model:
        assert model.generate("Hello", options=options).stats.drafted_tokens > 20
    assert script.main([str(head), str(TARGET), "-o", str(tmp_path / "head.gguf"), "--model", str(GRAPH)]) == 2
    assert "convert_hf_to_gguf.py" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["fc", "frequencies", "embedding_norm"])
def test_a_wrong_conversion_is_refused(fault: str, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = script.heads_of

    def wrong(*given: Any) -> HeadFile:
        made = right(*given)
        return dataclasses.replace(made, arrays={**made.arrays, fault: np.roll(made.arrays[fault], 1, axis=-1)})

    monkeypatch.setattr(script, "heads_of", wrong)
    write_heads(head, TARGET, opened, tmp_path / "heads.npz")
    with pytest.raises(ExportRefused, match=r"heads\.npz is wrong and was removed: compared with its definition"):
        check_heads(head, TARGET, opened, tmp_path / "heads.npz")

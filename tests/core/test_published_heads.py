"""Heads that do not fit: an EAGLE-3 head as published, which llama.cpp converts, and heads of another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgespec.cli.main import cli
from edgespec.platform.files import shipped_models


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "a head"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_the_error_says_what_converts_it(head: Path) -> None:
    exported = CliRunner().invoke(cli, ["export", str(head), "--to", "onnx", "--no-check"])
    assert exported.exit_code == 2, exported.output
    assert "is a LlamaForCausalLMEagle3; supported for ONNX by" in exported.stderr
    assert "convert_hf_to_gguf.py knows more of them" in exported.stderr


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_heads_that_read_layers_of_a_deeper_model_are_refused(engine: str) -> None:
    heads = shipped_models() / "smollm2" / "eagle.npz"
    arguments = ["generate", "demo", "--engine", engine, "--heads", str(heads), "-p", "x", "-n", "1"]
    found = CliRunner().invoke(cli, arguments)
    assert found.exit_code == 2 and "the heads read the input of layer 14" in found.stderr
    assert "give heads that were made for" in found.stderr and "edgespec export" not in found.stderr

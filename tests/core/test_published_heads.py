"""Heads that do not fit: an EAGLE-3 head as published, whose conversion the error names, and heads of another model."""

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


@pytest.mark.parametrize("option", ["-md", "--heads"])
def test_the_error_names_the_command(head: Path, target_path: Path, option: str) -> None:
    for given in (head, head / "model.safetensors") if option == "--heads" else (head,):
        found = CliRunner().invoke(cli, ["generate", str(target_path), option, str(given), "-p", "x", "-n", "1"])
        assert found.exit_code == 2
        assert f"python scripts/train/eagle3.py '{head}' TARGET" in found.stderr, found.output
    exported = CliRunner().invoke(cli, ["export", str(target_path), "--to", "onnx", "--draft", str(head)])
    assert exported.exit_code == 2 and "EAGLE-3 head as published" in exported.stderr


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_heads_that_read_layers_of_a_deeper_model_are_refused(engine: str) -> None:
    heads = shipped_models() / "smollm2" / "eagle.npz"
    arguments = ["generate", "demo", "--engine", engine, "--heads", str(heads), "-p", "x", "-n", "1"]
    found = CliRunner().invoke(cli, arguments)
    assert found.exit_code == 2 and "the heads read the input of layer 14" in found.stderr
    assert "give heads that were made for" in found.stderr and "edgespec export" not in found.stderr

"""`edgespec export FOLDER --to onnx`: a Hugging Face model becomes a pair that runs, in one command, without torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="export needs the package gguf: scripts/run.py install export")

from demo import DEMO
from edgespec.export import check, room
from edgespec.export import pair as pairs
from edgespec.formats.manifest import read_pair
from edgespec.installation import has_engine
from gguf_conversions import answer, export, export_without
from tiny_checkpoints import write_checkpoint

TARGET, DRAFT = DEMO / "hf" / "target", DEMO / "hf" / "draft"
NEEDS_LLAMA = pytest.mark.skipif(not has_engine("llamacpp"), reason="compares with llama.cpp, which is not installed")
ROTATED = {"rope_type": "default", "rope_theta": 5000.0}
HEAVY = ("torch", "transformers", "safetensors")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch):
    """What a machine with edgespec and llama.cpp has."""
    for module in (pairs, room):
        monkeypatch.setattr(module, "has_transformers", lambda: False)


@NEEDS_LLAMA
def test_a_pair_is_made_and_says_what_the_model_says(tmp_path: Path):
    source = tmp_path / "Demo-8M"
    shutil.copytree(TARGET, source)
    (source / "README.md").write_text("---\nlicense: cc-by-sa-4.0\n---\n# Demo\n")
    (source / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    result = export(source, tmp_path / "pair", "--quant", "w8a8", "--draft", str(DRAFT))
    assert result.exit_code == 0, result.output
    assert "check target onnx: top-1 agreement 100.0%" in result.stdout
    assert result.stdout.splitlines()[-2] == "compared with llama.cpp on the same weights"
    pair = read_pair(tmp_path / "pair")
    assert (pair.name, pair.licence, pair.context_length) == ("Demo-8M", "cc-by-sa-4.0", 2048)
    assert pair.recommended == {"temperature": 0.6, "top_k": 20}
    assert pair.figures["check"]["target"]["onnx"]["mean_kl"] < 0.005
    assert pair.figures["check"]["draft"]["onnx"]["mean_kl"] < 0.005
    assert str(tmp_path) not in (tmp_path / "pair" / "manifest.toml").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Demo-8M", "pair"]
    ours, theirs = answer(tmp_path / "pair"), answer(DEMO / "demo-target-q8_0.gguf")
    assert ours["engine"] == "onnx"
    assert ours["text"] == theirs["text"]


def test_it_needs_nothing_but_edgespec_itself(tmp_path: Path):
    """Without llama.cpp the float graph of the same weights tells what the type loses."""
    options = ["--to", "onnx", "-o", str(tmp_path / "pair")]
    said = export_without((*HEAVY, "llama_cpp", "gguf"), str(TARGET), *options)
    assert "compared with the float32 graph of the same weights" in said
    pair = read_pair(tmp_path / "pair")
    assert 0 < pair.figures["check"]["target"]["onnx"]["mean_kl"] < 0.002


@NEEDS_LLAMA
def test_a_wrong_conversion_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a rotary base that config.json does not say."""
    monkeypatch.setattr("edgespec.export.onnx.hub_model.rotary_settings", lambda config: ROTATED)
    result = export(TARGET, tmp_path / "pair")
    assert result.exit_code == 1, result.output
    assert "the conversion is wrong and was removed: compared with llama.cpp" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "pair").exists()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_without_llama_cpp_and_room_nothing_is_compared(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pairs, "has_engine", lambda engine: False)
    monkeypatch.setattr(check, "free_bytes", lambda place: 1000)
    arguments = ["--draft", str(DRAFT)] if role == "draft" else []
    result = export(TARGET, tmp_path / "pair", *arguments)
    assert result.exit_code == 0, result.output
    assert f"{role}: not compared with its weights in float32: that needs" in result.stderr
    assert "compared with nothing" in result.stdout


@NEEDS_LLAMA
def test_a_tokenizer_that_llama_cpp_lacks_is_taken_as_it_is(tmp_path: Path):
    """The graph is then compared with itself in float32."""
    source = write_checkpoint(tmp_path / "tiny", "smollm2")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Digits", "individual_digits": False})
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = export(source, tmp_path / "pair")
    assert result.exit_code == 0, result.output
    assert "compared with the float32 graph of the same weights" in result.stdout
    made = tmp_path / "pair" / "onnx" / "target" / "tokenizer.json"
    assert made.read_bytes() == (source / "tokenizer.json").read_bytes()


def test_what_only_optimum_knows_is_said(tmp_path: Path):
    source = write_checkpoint(tmp_path / "tiny", "gemma2")
    result = export(source, tmp_path / "pair", "--no-check")
    assert result.exit_code == 2, result.output
    assert "--exporter optimum" in result.stderr.splitlines()[-1]

"""`edgespec export MODEL.gguf --to onnx`: from one file, or target and draft, to a pair that runs, without torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("gguf", reason="export needs the package gguf: scripts/run.py install export")

from demo import DEMO
from edgespec.cli.main import cli
from edgespec.export import check
from edgespec.export.check import Limits, limits_of
from edgespec.formats.manifest import read_pair
from edgespec.installation import has_engine
from gguf_conversions import answer, export, export_without
from tiny_gguf import write_model

TARGET, DRAFT = DEMO / "demo-target-q8_0.gguf", DEMO / "demo-draft-q8_0.gguf"
NEEDS_LLAMA = pytest.mark.skipif(not has_engine("llamacpp"), reason="compares with llama.cpp, which is not installed")
HEAVY = ("torch", "transformers", "safetensors")

pytestmark = pytest.mark.usefixtures("one_thread")


@NEEDS_LLAMA
def test_a_pair_is_made_and_says_what_the_file_says(tmp_path: Path):
    result = export(TARGET, tmp_path / "pair", "--quant", "w8a8", "--draft", str(DRAFT))
    assert result.exit_code == 0, result.output
    assert "check target onnx: top-1 agreement 100.0%" in result.stdout
    assert result.stdout.splitlines()[-2] == "compared with llama.cpp on the same weights"
    pair = read_pair(tmp_path / "pair")
    assert (pair.name, pair.context_length, pair.engines) == ("demo-target-q8_0-w8a8", 2048, ("onnx",))
    assert pair.figures["check"]["target"]["onnx"]["mean_kl"] < 0.005
    assert pair.figures["made_of"]["draft"] == {"file": DRAFT.name, "bytes": DRAFT.stat().st_size}
    assert str(tmp_path) not in (tmp_path / "pair" / "manifest.toml").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]
    ours, theirs = answer(tmp_path / "pair"), answer(TARGET)
    assert ours["engine"] == "onnx"
    assert ours["text"] == theirs["text"]


def test_it_needs_neither_torch_nor_llama_cpp(tmp_path: Path):
    """Without llama.cpp the float graph of the same weights tells what the type loses."""
    options = ["--to", "onnx", "-o", str(tmp_path / "pair")]
    said = export_without((*HEAVY, "llama_cpp"), str(TARGET), *options)
    assert "compared with the float32 graph of the same weights" in said
    pair = read_pair(tmp_path / "pair")
    assert 0 < pair.figures["check"]["target"]["onnx"]["mean_kl"] < 0.002
    assert pair.figures["check"]["tokenisation"] == "round trip"


@NEEDS_LLAMA
def test_what_a_type_loses_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A graph beyond the usual limit is right where the weights as float32 agree with llama.cpp."""
    usual = limits_of
    monkeypatch.setattr(check, "limits_of", lambda q: Limits(None, 1.0, 1e-4) if q == "w8a8" else usual(q))
    result = export(TARGET, tmp_path / "pair", "--quant", "w8a8")
    assert result.exit_code == 0, result.output
    assert "the conversion is correct, but w8a8 loses more of this model than of most: mean KL is" in result.stderr
    figures = read_pair(tmp_path / "pair").figures["check"]
    assert figures["reference"] == "llama.cpp on the weights as float32"
    kinds = {kind: found["mean_kl"] for kind, found in figures["target"].items()}
    assert kinds["onnx_fp32"] < 1e-6 < kinds["llamacpp"] < kinds["onnx"]
    assert "check target, llama.cpp on the GGUF: top-1 agreement 100.0%" in result.stdout
    assert not list((tmp_path / "pair").rglob("*float32*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "gguf"], "is a GGUF already: give --to onnx"),
        (["--to", "both"], "is a GGUF already: give --to onnx"),
        (["--exporter", "optimum"], "--exporter optimum does not read GGUF"),
        (["--revision", "main"], "is a file: omit it"),
        (["--draft", "some/hub-id"], "must be a .gguf file, too"),
        (["--draft", "missing.gguf"], "missing.gguf does not exist"),
    ],
)
def test_options_that_need_the_original_model_are_refused(arguments: list[str], said: str, tmp_path: Path):
    result = export(TARGET, tmp_path / "pair", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and said in line
    assert list(tmp_path.iterdir()) == []


def test_a_draft_of_another_family_is_refused(tmp_path: Path):
    draft = write_model(tmp_path / "other.gguf")
    result = export(TARGET, tmp_path / "pair", "--draft", str(draft))
    assert result.exit_code == 2
    assert "target and draft have different vocabularies: token" in result.stderr


def test_an_output_without_a_name_is_called_like_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    path = write_model(tmp_path / "small.Q8_0.gguf")
    result = CliRunner().invoke(cli, ["export", "small.Q8_0.gguf", "--to", "onnx", "--no-check"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == "small.Q8_0-pair"
    made_of = {"target": {"file": path.name, "bytes": path.stat().st_size}}
    assert read_pair(tmp_path / "small.Q8_0-pair").figures["made_of"] == made_of


def test_a_vocabulary_that_is_not_known_is_refused_before_work_starts(tmp_path: Path):
    path = write_model(tmp_path / "other.gguf", metadata={"tokenizer.ggml.pre": "bloom"})
    result = export(path, tmp_path / "pair")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the GGUF's vocabulary splits text as 'bloom'; allowed: ")

"""`edgespec export SOURCE --to onnx`: a Hugging Face folder or a GGUF becomes a pair that runs, without torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from demo import DEMO
from edgespec.cli.main import cli
from edgespec.export import pair as pairs
from edgespec.export import source as sources
from edgespec.export.check import AllowedDifference, limits_of
from edgespec.formats.manifest import read_pair
from gguf_conversions import answer, export, export_without
from needs import NEEDS_LLAMA
from tiny_checkpoints import write_checkpoint
from tiny_gguf import write_model

FILE, FILE_DRAFT = DEMO / "demo-target-q8_0.gguf", DEMO / "demo-draft-q8_0.gguf"
FOLDER, FOLDER_DRAFT = DEMO / "hf" / "target", DEMO / "hf" / "draft"
HEAVY = ("torch", "transformers", "safetensors")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch):
    """What a machine with edgespec and llama.cpp has."""
    for module in (pairs, sources):
        monkeypatch.setattr(module, "has_transformers", lambda: False)


@NEEDS_LLAMA
@pytest.mark.parametrize(("source", "draft"), [(FILE, FILE_DRAFT), (FOLDER, FOLDER_DRAFT)], ids=["file", "folder"])
def test_a_pair_is_made_and_says_what_the_model_says(source: Path, draft: Path, tmp_path: Path):
    result = export(source, tmp_path / "pair", "--quant", "int8", "--draft", str(draft))
    assert result.exit_code == 0, result.output
    assert "check target onnx: top-1 agreement " in result.stdout
    assert result.stdout.splitlines()[-2] == "compared with llama.cpp on the same weights"
    pair = read_pair(tmp_path / "pair")
    assert (pair.context_length, pair.engines) == (2048, ("onnx",))
    for role in ("target", "draft"):
        assert pair.figures["check"][role]["onnx"]["mean_kl"] < 0.005
    if source == FILE:
        assert pair.name == "demo-target-q8_0-int8"
        assert pair.figures["made_of"]["draft"] == {"file": draft.name, "bytes": draft.stat().st_size}
    assert str(tmp_path) not in (tmp_path / "pair" / "manifest.toml").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]
    ours, theirs = answer(tmp_path / "pair"), answer(FILE)
    assert ours["engine"] == "onnx" and ours["text"] == theirs["text"]


@pytest.mark.parametrize("source", [FILE, FOLDER], ids=["file", "folder"])
def test_it_needs_neither_torch_nor_llama_cpp(source: Path, tmp_path: Path):
    """But then nothing is compared."""
    said = export_without((*HEAVY, "llama_cpp"), str(source), "--to", "onnx", "-o", str(tmp_path / "pair"))
    assert "compared with nothing" in said
    assert read_pair(tmp_path / "pair").figures["check"]["tokenisation"] == "round trip"


@NEEDS_LLAMA
def test_a_wrong_graph_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the rows of heads in another order."""
    monkeypatch.setattr("edgespec.formats.gguf.model.GgufTensors._order", lambda self, count, row: None)
    result = export(FOLDER, tmp_path / "pair")
    assert result.exit_code == 1, result.output
    assert "target onnx int8 is wrong and was removed: compared with llama.cpp" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "pair").exists()


def test_what_only_optimum_knows_is_said(tmp_path: Path):
    source = write_checkpoint(tmp_path / "tiny", "gpt2")
    result = export(source, tmp_path / "pair", "--no-check")
    assert result.exit_code == 2, result.output
    assert "--exporter optimum" in result.stderr.splitlines()[-1]


@NEEDS_LLAMA
def test_what_a_type_loses_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual = limits_of
    monkeypatch.setattr(pairs, "limits_of", lambda *q: AllowedDifference(0.9, 1e-4))
    result = export(FILE, tmp_path / "pair", "--quant", "int8")
    assert result.exit_code == 0, result.output
    assert "target: onnx int8 loses more of this model than of most: mean KL is" in result.stderr
    figures = read_pair(tmp_path / "pair").figures["check"]
    assert figures["reference"] == "llama.cpp on the same weights"
    assert 1e-4 < figures["target"]["onnx"]["mean_kl"] < usual("int8").max_kl


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
    result = export(FILE, tmp_path / "pair", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and said in line
    assert list(tmp_path.iterdir()) == []


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

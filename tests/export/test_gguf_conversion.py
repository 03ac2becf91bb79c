"""`edgespec export MODEL.gguf --to onnx`: from one file, or target and draft, to a pair that runs, without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("gguf", reason="export needs the package gguf: scripts/run.py install export")

from demo import DEMO
from edgespec.cli.main import cli
from edgespec.export import check, room
from edgespec.export import pair as pairs
from edgespec.export.check import Limits, limits_of
from edgespec.export.gguf.convert import convert
from edgespec.export.onnx.weights import GgufWeights
from edgespec.export.pair import export_pair
from edgespec.export.request import ExportRequest
from edgespec.export.room import human
from edgespec.formats.gguf.model import KINDS
from edgespec.formats.manifest import read_pair
from edgespec.installation import has_engine
from gguf_conversions import Interrupted, answer, export, export_without
from tiny_checkpoints import write_checkpoint
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


@NEEDS_LLAMA
def test_a_wrong_conversion_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Queries and keys whose rotary pairs stay where llama.cpp has them."""
    monkeypatch.setattr(GgufWeights, "_order", lambda self, count, row: None)
    result = export(TARGET, tmp_path / "pair", "--quant", "w8a8")
    assert result.exit_code == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: the conversion is wrong and was removed: compared with llama.cpp on the weights")
    assert list(tmp_path.iterdir()) == []


@NEEDS_LLAMA
def test_the_table_from_which_llama_cpp_reads_gelu_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the weights of Gemma 3 270M its 16 bits move logits by a tenth of their spread; a fault moves more."""
    source = write_checkpoint(tmp_path / "source", "gemma3")
    convert(source, tmp_path / "gemma.gguf", "f32")
    usual, strict = limits_of, {"fp32": Limits(2e-5, 1.0, 1e-12), "int8": Limits(None, 1.0, 0.0)}
    monkeypatch.setattr(check, "limits_of", lambda quant: strict.get(quant) or usual(quant))
    result = export(tmp_path / "gemma.gguf", tmp_path / "pair", "--quant", "int8")
    assert result.exit_code == 0, result.output
    assert read_pair(tmp_path / "pair").figures["check"]["target"]["onnx_fp32"]["max_difference"] > 2e-5
    monkeypatch.setitem(KINDS, "gemma3", replace(KINDS["gemma3"], unrotated_every=2))
    result = export(tmp_path / "gemma.gguf", tmp_path / "wrong", "--quant", "int8")
    assert result.exit_code == 1 and "the conversion is wrong and was removed" in result.stderr


def test_of_a_large_vocabulary_fewer_rows_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert [room.rows_per_compared(size) for size in (49152, 151936, 262144, 1 << 20)] == [1, 1, 2, 8]
    assert room.logits_bytes(262144) == room.logits_bytes(131072)
    counts = {}
    for limit in (1 << 27, 800 * 1024):
        monkeypatch.setattr(room, "MOST_LOGITS", limit)
        assert export(TARGET, tmp_path / str(limit)).exit_code == 0
        figures = read_pair(tmp_path / str(limit)).figures["check"]["target"]["onnx"]
        counts[limit] = figures["num_tokens"]
        assert figures["top1_agreement"] > 0.97
    assert counts[800 * 1024] == pytest.approx(counts[1 << 27] / 4, abs=10)


@NEEDS_LLAMA
def test_without_room_for_floats_the_cause_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "limits_of", lambda quant: Limits(None, 1.0, 0.0))
    monkeypatch.setattr(check, "free_bytes", lambda place: 1000)
    result = export(TARGET, tmp_path / "pair")
    assert result.exit_code == 0, result.output
    assert f"the cause was not found: that needs {human(36667904)} of disk, 1 kB are free" in result.stderr


def test_an_interrupted_export_continues(tmp_path: Path):
    request = ExportRequest(
        str(TARGET), tmp_path / "pair", quants={"onnx": "int8"}, draft=str(DRAFT), check=False, threads=1
    )
    with pytest.raises(KeyboardInterrupt):
        export_pair(request, Interrupted(at="draft"))
    assert not (tmp_path / "pair").exists()
    kept = tmp_path / ".pair.export" / "pair" / "onnx" / "target" / "model.onnx.data"
    before = kept.stat().st_ino
    second = Interrupted()
    done = export_pair(request, second)
    assert "resuming an interrupted export: 6 files are finished" in second.notes
    assert (tmp_path / "pair" / "onnx" / "target" / "model.onnx.data").stat().st_ino == before
    assert done.figures == {"performed": False, "tokenisation": "equal" if has_engine("llamacpp") else "round trip"}


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


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(pairs, "find_spec", lambda name: None if name == "gguf" else name)
    result = export(TARGET, tmp_path / "pair")
    assert result.exit_code == 2
    assert "converting a GGUF needs gguf: " in result.stderr and "install" in result.stderr


def test_a_vocabulary_that_is_not_known_is_refused_before_work_starts(tmp_path: Path):
    path = write_model(tmp_path / "other.gguf", metadata={"tokenizer.ggml.pre": "bloom"})
    result = export(path, tmp_path / "pair")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the GGUF's vocabulary splits text as 'bloom'; allowed: ")

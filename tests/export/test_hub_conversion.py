"""`edgespec export FOLDER --to onnx`: a Hugging Face model becomes a pair that runs, in one command, without torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="export needs the package gguf: scripts/run.py install export")

from demo import DEMO
from edgespec.export import check, room
from edgespec.export import pair as pairs
from edgespec.export.check import Limits, limits_of
from edgespec.export.onnx.weights import HubWeights
from edgespec.export.pair import export_pair
from edgespec.export.request import ExportRequest
from edgespec.formats.manifest import read_pair
from edgespec.installation import has_engine
from gguf_conversions import Interrupted, answer, export, export_without
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
def test_what_a_type_loses_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual = limits_of
    monkeypatch.setattr(check, "limits_of", lambda q: Limits(None, 1.0, 1e-4) if q == "w8a8" else usual(q))
    result = export(TARGET, tmp_path / "pair", "--quant", "w8a8")
    assert result.exit_code == 0, result.output
    assert "target: the conversion is correct, but w8a8 loses more of this model than of most: mean KL" in result.stderr
    figures = read_pair(tmp_path / "pair").figures["check"]
    assert figures["reference"] == "llama.cpp on the weights as float32"
    assert figures["target"]["onnx_fp32"]["mean_kl"] < 1e-6 < figures["target"]["onnx"]["mean_kl"]
    assert not [path for path in (tmp_path / "pair").rglob("*") if path.suffix == ".gguf" or "float" in path.name]


@NEEDS_LLAMA
@pytest.mark.parametrize("fault", ["names", "rotation"])
def test_a_wrong_conversion_is_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Gate and up projection swapped; a rotary base that config.json does not say."""
    if fault == "names":
        right = HubWeights._stored
        swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

        def wrong(self: HubWeights, name: str) -> str:
            kind = name.split(".")[-2]
            return right(self, name.replace(kind, swapped.get(kind, kind)))

        monkeypatch.setattr(HubWeights, "_stored", wrong)
    else:
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


def test_an_export_goes_on_where_it_stopped(tmp_path: Path):
    quants = {"onnx": "int8"}
    request = ExportRequest(str(TARGET), tmp_path / "pair", quants, draft=str(DRAFT), check=False)
    with pytest.raises(KeyboardInterrupt):
        export_pair(request, Interrupted(at="draft"))
    assert not (tmp_path / "pair").exists()
    kept = tmp_path / ".pair.export" / "pair" / "onnx" / "target" / "model.onnx.data"
    before = kept.stat().st_ino
    second = Interrupted()
    export_pair(request, second)
    assert any(note.startswith("resuming an interrupted export") for note in second.notes)
    assert (tmp_path / "pair" / "onnx" / "target" / "model.onnx.data").stat().st_ino == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quant", "fp16"], "'fp16' is not a type of onnx"),
        (["--quant", "w8a8", "--exporter", "optimum"], "--exporter optimum does not write w8a8; allowed: int4"),
        (["--exporter", "edgspec"], "allowed: edgespec, optimum"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], said: str, tmp_path: Path):
    result = export(TARGET, tmp_path / "pair", "--no-check", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert said in result.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_what_only_optimum_knows_is_said(tmp_path: Path):
    source = write_checkpoint(tmp_path / "tiny", "gemma2")
    result = export(source, tmp_path / "pair", "--no-check")
    assert result.exit_code == 2, result.output
    assert "--exporter optimum" in result.stderr.splitlines()[-1]


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 5000), "model.safetensors"),
        (lambda folder: change_config(folder, num_hidden_layers=0), "num_hidden_layers"),
        (lambda folder: change_config(folder, rms_norm_eps={}), "rms_norm_eps"),
        (lambda folder: change_config(folder, architectures=["WobbleForCausalLM"]), "WobbleForCausalLM"),
    ],
)
def test_a_damaged_folder_is_one_line(damage: Callable[[Path], object], said: str, tmp_path: Path):
    folder = shutil.copytree(DRAFT, tmp_path / "draft")
    damage(folder)
    result = export(folder, tmp_path / "pair", "--no-check")
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith("error: ") and said in result.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]

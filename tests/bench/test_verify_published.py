"""The check of published models runs against a hub on this machine: tiny models of several kinds, one broken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_mixtures
import verify_published
from edgespec.kernels.library import library_path
from edgespec.loading import catalogue
from hub_server import HubServer, serve
from hybrid_gguf import write_lfm2
from tiny_gguf import write_model

Run = Callable[..., dict[str, Any]]
ENTRY = """
[models."{name}"]
description = "tiny"
parameters = {size}
repo = "tiny/{name}"
weights = "tiny/{name}"
quant = ""
"""
HEADS = 'heads = [{kind = "mtp", repo = "tiny/head", target = "tiny/gemma", gguf = "tiny/head-GGUF:mtp-gemma.gguf"}]\n'


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    names = ("llama", "hybrid", "mixture", "gemma", "broken", "head-GGUF")
    folders = {f"tiny/{name}": tmp_path / "hub" / name for name in names}
    for folder in folders.values():
        folder.mkdir(parents=True)
    write_model(folders["tiny/llama"] / "llama.gguf")
    write_lfm2(folders["tiny/hybrid"] / "hybrid.gguf")
    tiny_mixtures.write(folders["tiny/mixture"] / "mixture.gguf", tiny_mixtures.CASES["qwen3moe"])
    tiny_mixtures.write(folders["tiny/gemma"] / "gemma.gguf", tiny_mixtures.GEMMA)
    tiny_mixtures.write_drafter(folders["tiny/head-GGUF"] / "mtp-gemma.gguf")
    (folders["tiny/broken"] / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with serve(folders) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The script with a catalogue of these; what it wrote, by name."""
    shipped = tmp_path / "catalogue"
    shipped.mkdir()
    text = 'format = 1\nfamily = "tiny"\nlicence = "none"\n'
    for size, name in enumerate(("llama", "hybrid", "mixture", "gemma", "broken"), 1):
        text += ENTRY.format(name=name, size=size * 1_000_000) + (HEADS if name == "gemma" else "")
    (shipped / "tiny.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(catalogue, "shipped_models", lambda: shipped)
    catalogue.entries.cache_clear()
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"

    def call(*arguments: str) -> dict[str, Any]:
        few = ("--out", str(out), "--prompts", "1", "--tokens", "48", "--context", "256")
        monkeypatch.setattr("sys.argv", ["verify_published.py", *few, *arguments])
        code = verify_published.main()
        told = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in out.glob("verify-*.json")}
        return {"code": code, "table": (out / "results.md").read_text(encoding="utf-8"), **told}

    yield call  # type: ignore[misc]
    catalogue.entries.cache_clear()


def test_models_of_several_kinds_are_pulled_compared_and_planned(run: Run, tmp_path: Path, hub: HubServer) -> None:
    found = run("llama", "hybrid", "mixture")
    names = [f"verify-{name}" for name in ("llama", "hybrid", "mixture")]
    for name in names:
        told = found[name]
        assert (told["differs"], told["compared"]) == ([], 4), told
        assert told["plain_per_s"] > 0 and told["planned_bytes"] and told["peak_bytes"] and told["drafted"]
        assert told["files"][0]["sha256"] and told["outcome"] in ("passed", "failed")
        assert told.get("step", "memory") == "memory"  # interpreters differ by more than such models weigh
    if library_path() is not None:
        assert {found[name]["engine"] for name in names} == {"onnx"}
    assert found["table"].count("4 answers, ") == 3
    asked = len(hub.asked)
    run("llama", "hybrid", "mixture")
    assert len(hub.asked) == asked, "what is done is not done again"
    assert (tmp_path / "models" / "verify-llama").is_dir()


def test_a_head_comes_with_its_target_and_leaves_with_it(run: Run, tmp_path: Path) -> None:
    told = run("gemma", "--discard")["verify-gemma"]
    assert told["draft"] == "mtp-gemma.gguf" and len(told["files"]) == 2
    assert told["differs"] == [] and told["drafter"] in ("auto", "mtp")
    assert not (tmp_path / "models" / "verify-gemma").exists()


def test_what_fails_says_what_to_do(run: Run, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("broken")
    assert found["code"] == 1 and found["verify-broken"]["step"] == "pull"
    assert "not a usable" in found["verify-broken"]["reason"] and "models/*.toml" in found["verify-broken"]["fix"]
    found = run("llama", "--minutes", "0.001")
    assert (found["verify-llama"]["outcome"], found["verify-llama"]["fix"]) == (
        "to be tried again",
        "give more time with --minutes",
    )
    assert "--minutes" in found["table"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = run("hybrid")["verify-hybrid"]
    assert told["step"] == "network" and "goes on where it stopped" in told["fix"]
    with pytest.raises(SystemExit, match="not in the catalogue: nothing; --list shows what is"):
        run("nothing")

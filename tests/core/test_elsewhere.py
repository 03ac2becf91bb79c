"""Models of Ollama, LM Studio and the hub's cache run by the names they have there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import edgespec
from demo import TEST_THREADS
from edgespec.cli.main import cli
from edgespec.errors import ModelNotFound
from edgespec.loading.registry import found_elsewhere, path_elsewhere, resolve
from edgespec.platform.files import shipped_models

DEMO = shipped_models() / "demo"
WEIGHTS = "application/vnd.ollama.image.model"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for name in ("OLLAMA_MODELS", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "own"))
    return tmp_path


def ollama(root: Path, name: str, digest: str = "a" * 64, **changed: object) -> Path:
    """A model as `ollama pull` keeps it; its manifest."""
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(DEMO / "demo-draft-q8_0.gguf", blob)
    layers = [{"mediaType": WEIGHTS, "digest": f"sha256:{digest}"}, {"mediaType": "other", "digest": "sha256:0"}]
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "layers": layers} | changed))
    return path


def hub(root: Path, repo: str, *files: str, commit: str = "c1", is_main: bool = True) -> Path:
    """A repository as huggingface_hub keeps it; its snapshot."""
    folder = root / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in files:
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(DEMO / "demo-draft-q8_0.gguf", snapshot / file)
    if is_main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return snapshot


def test_a_model_of_ollamas_answers_by_its_name_there(home: Path) -> None:
    ollama(home / ".ollama" / "models", "registry.ollama.ai/library/tiny/135m")
    with edgespec.load("tiny:135m", threads=TEST_THREADS, reproducible=False) as model:
        assert model.pair.name == "tiny-135m"
        assert model.generate("Hello", options=edgespec.GenerateOptions(max_tokens=2)).stats.new_tokens == 2
    with pytest.raises(ModelNotFound, match="no model 'tiny'"):
        resolve("tiny")  # which is tiny:latest


def test_names_of_ollamas(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = home / "elsewhere"
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    ollama(root, "registry.ollama.ai/library/llama/latest")
    ollama(root, "registry.ollama.ai/someone/llama/8b", "b" * 64)
    ollama(root, "hf.co/org/Repo-GGUF/Q4_K_M")
    assert sorted(each.name for each in found_elsewhere()) == [
        *("hf.co/org/Repo-GGUF:Q4_K_M", "llama:latest", "someone/llama:8b")
    ]
    assert path_elsewhere("llama") == path_elsewhere("llama:latest") != path_elsewhere("someone/llama:8b")
    assert resolve("hf.co/org/Repo-GGUF:Q4_K_M").target.is_file()


def test_what_is_damaged_or_no_gguf_is_left_out(home: Path) -> None:
    root = home / ".ollama" / "models"
    for index, layers in enumerate(([{}], "no", [{"mediaType": WEIGHTS, "digest": "sha256:../../x"}], [])):
        ollama(root, f"registry.ollama.ai/library/m/{index}", layers=layers)
    ollama(root, "registry.ollama.ai/library/m/text").write_text("{")
    ollama(root, "registry.ollama.ai/library/m/other", "b" * 64)
    (root / "blobs" / f"sha256-{'b' * 64}").write_bytes(b"no model")
    ollama(root, "registry.ollama.ai/library/m/gone", "d" * 64)
    (root / "blobs" / f"sha256-{'d' * 64}").unlink()
    ollama(root, "registry.ollama.ai/library/m/deep").write_text("[" * 200_000)
    ollama(root, "stray")
    ollama(root, "host/stray")
    assert list(found_elsewhere()) == []


def test_a_repository_in_the_hubs_cache_is_chosen_from_as_a_pull_does(home: Path) -> None:
    cache = home / ".cache" / "huggingface" / "hub"
    hub(cache, "org/Tiny-GGUF", "Tiny-Q8_0.gguf", "sub/Tiny-Q4_K_M.gguf", "mmproj-Tiny.gguf")
    hub(cache, "org/Tiny-GGUF", "Tiny-Q2_K.gguf", commit="older", is_main=False)
    assert {each.name for each in found_elsewhere()} == {"org/Tiny-GGUF:Q8_0", "org/Tiny-GGUF:Q4_K_M"}
    assert resolve("org/Tiny-GGUF").target.name == "Tiny-Q4_K_M.gguf"
    assert resolve("hf.co/org/tiny-gguf:q8_0", draft=Path("org/Tiny-GGUF:Q4_K_M")).draft is not None
    with pytest.raises(ModelNotFound, match="edgespec pull org/Tiny-GGUF:Q6_K"):
        resolve("org/Tiny-GGUF:Q6_K")


def test_a_file_that_is_there_and_a_pulled_model_come_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(home / ".cache" / "huggingface" / "hub", "org/name", "Other-Q8_0.gguf")
    monkeypatch.chdir(home)
    (home / "org" / "name").mkdir(parents=True)
    shutil.copyfile(DEMO / "demo-target-q8_0.gguf", home / "org" / "name" / "own.gguf")
    assert resolve("org/name").target.name == "own.gguf"


def test_ls_shows_where_each_is(home: Path) -> None:
    ollama(home / ".ollama" / "models", "registry.ollama.ai/library/tiny/135m")
    studio = home / ".lmstudio" / "models" / "org" / "Tiny-GGUF"
    studio.mkdir(parents=True)
    shutil.copyfile(DEMO / "demo-draft-q8_0.gguf", studio / "Tiny-Q8_0.gguf")
    rows = {each["name"]: each for each in json.loads(CliRunner().invoke(cli, ["ls", "--json"]).stdout)}
    assert rows["tiny:135m"]["state"] == "in Ollama" and rows["org/Tiny-GGUF:Q8_0"]["state"] == "in LM Studio"
    assert rows["tiny:135m"]["bytes"] == (DEMO / "demo-draft-q8_0.gguf").stat().st_size

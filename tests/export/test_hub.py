"""Models from a hub: fetched from a server on this machine, found in the cache, or refused in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.errors import ModelFileError, ModelNotFound
from edgespec.export.hub import find_source
from edgespec.formats.manifest import read_pair
from hub_server import COMMIT, HubServer, serve

ROOT = Path(__file__).resolve().parents[2]
DRAFT = ROOT / "models" / "demo" / "hf" / "draft"
ID = "edge/demo"


@pytest.fixture
def model(tmp_path) -> Path:
    """The demo draft as a hub would hold it, with files that no export needs."""
    folder = Path(shutil.copytree(DRAFT, tmp_path / "model"))
    (folder / "README.md").write_text("---\nlicense: cc-by-sa-4.0\n---\n")
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1000)
    (folder / "consolidated.safetensors").write_bytes(b"x" * 1000)
    return folder


@pytest.fixture
def hub(model) -> Iterator[HubServer]:
    with serve({ID: model}) as server:
        yield server


def export(output: Path, cache: Path, endpoint: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """The command as a user runs it, with the hub's settings in the environment."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "EDGESPEC_THREADS": "1", **environment}
    command = [sys.executable, "-m", "edgespec", "export", *arguments, "-o", str(output), "--no-check"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=kept | settings)
    return done.returncode, done.stdout, done.stderr


def test_a_model_is_fetched_once_and_found_again_without_a_network(tmp_path, model):
    cache = tmp_path / "cache"
    with serve({ID: model}) as hub:
        code, _, said = export(tmp_path / "fetched", cache, hub.endpoint, ID)
        assert code == 0, said
        fetched = {asked.rpartition("/")[2] for asked in hub.asked if asked.startswith("GET edge/")}
        assert fetched == {"config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "model.safetensors"}
        assert "fetching model.safetensors, 2 MiB" in said
        code, _, said = export(tmp_path / "offline", cache, hub.endpoint, ID, HF_HUB_OFFLINE="1")
        assert code == 0, said
        assert "using the cached copy" in said and "HF_HUB_OFFLINE forbids downloads" in said
    code, _, said = export(tmp_path / "unreachable", cache, hub.endpoint, ID)
    assert code == 0, said
    assert "using the cached copy" in said and "could not be fetched" in said
    pairs = [read_pair(tmp_path / name) for name in ("fetched", "offline", "unreachable")]
    assert len({pair.files["target"].sha256 for pair in pairs}) == 1
    assert (pairs[0].name, pairs[0].licence) == ("demo", "cc-by-sa-4.0")


def test_a_model_that_cannot_be_written_is_refused_before_its_weights_are_fetched(tmp_path, model, hub):
    config = json.loads((model / "config.json").read_text())
    scaled = config | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    (model / "config.json").write_text(json.dumps(scaled))
    code, _, said = export(tmp_path / "pair", tmp_path / "cache", hub.endpoint, ID, "--to", "onnx")
    assert code == 2
    assert "its rotary positions are scaled by 'yarn'" in said.splitlines()[-1]
    assert not any("GET" in asked and asked.endswith("model.safetensors") for asked in hub.asked)


@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_a_hub_out_of_reach_without_a_copy_says_where_it_looked_and_what_to_do(tmp_path, environment):
    code, output, said = export(tmp_path / "pair", tmp_path / "cache", "http://127.0.0.1:9", ID, **environment)
    assert code == 2
    assert output == ""
    (line,) = said.splitlines()
    assert line.startswith("error: ") and "edge/demo" in line and "http://127.0.0.1:9" in line
    assert ("HF_HUB_OFFLINE" in line) == bool(environment)
    assert f"{tmp_path / 'cache'}" in line
    assert "holds no copy of revision 'main'" in line
    assert "hf download edge/demo" in line
    assert not (tmp_path / "pair").exists()


@pytest.fixture
def in_process(tmp_path, hub, monkeypatch) -> HubServer:
    """The library's settings are read when it is imported, so tests of this process change them there."""
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return hub


def test_small_files_come_first_and_weights_when_they_are_wanted(in_process):
    source = find_source(ID)
    assert (source.name, source.folder.name) == ("demo", COMMIT)
    assert source.missing == source.weights == {"model.safetensors": (DRAFT / "model.safetensors").stat().st_size}
    assert not (source.folder / "model.safetensors").exists()
    source.fetch()
    assert (source.folder / "model.safetensors").read_bytes() == (DRAFT / "model.safetensors").read_bytes()
    assert find_source(ID).missing == {}
    assert find_source(ID, COMMIT).folder == source.folder


@pytest.mark.parametrize(
    ("hub_id", "revision", "said"),
    [("edge/nothing", None, "has no model 'edge/nothing'"), (ID, "v7", "no revision 'v7'")],
)
def test_what_the_hub_does_not_have_is_named(in_process, hub_id, revision, said):
    with pytest.raises(ModelNotFound, match=said):
        find_source(hub_id, revision)


def test_pickled_weights_are_refused_before_anything_is_fetched(in_process, model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"only .*pytorch_model\.bin.*pickled weights, which can run code"):
        find_source(ID)
    assert not [asked for asked in in_process.asked if "/resolve/" in asked]


@pytest.mark.parametrize("text", ["/no/such/folder", "./folder", "a/b/c", "~/nothing-here", ""])
def test_what_is_neither_a_folder_nor_an_id_is_refused_without_a_hub(text):
    with pytest.raises((ModelNotFound, ModelFileError), match="folder"):
        find_source(text)

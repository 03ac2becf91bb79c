"""The registry: names, paths, manifests, and every way in which each can be wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import edgespec
from edgespec.errors import ModelFileError, ModelNotFound
from edgespec.formats.manifest import read_pair
from edgespec.loading import registry as models
from edgespec.loading.download import check_hash
from edgespec.loading.registry import resolve
from tiny_gguf import write_model

TARGET, DRAFT = b"target weights", b"draft weights"


def file_table(role: str, path: str, content: bytes) -> str:
    return f'[files.{role}]\npath = "{path}"\nbytes = {len(content)}\nsha256 = "{hashlib.sha256(content).hexdigest()}"'


def manifest_text(**changes: str) -> str:
    parts = {
        "head": 'format = 1\nname = "pair"\ndescription = "two files"\nbanner = "hello"\ncontext_length = 64',
        "target": file_table("target", "t.gguf", TARGET),
        "draft": file_table("draft", "d.gguf", DRAFT),
        "sampling": "[sampling]\ntemperature = 0.7\ntop_k = 40",
    }
    return "\n".join((parts | changes).values()) + "\n"


def write_pair(folder: Path, **changes: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "t.gguf").write_bytes(TARGET)
    (folder / "d.gguf").write_bytes(DRAFT)
    (folder / "manifest.toml").write_text(manifest_text(**changes), encoding="utf-8")
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_name_is_a_pair_and_the_users_folder_comes_before_the_checkout(home: Path):
    assert "demo" in models.registered_folders()
    write_pair(home / "demo")
    pair = resolve("demo")
    assert (pair.banner, pair.context_length) == ("hello", 64)
    assert (pair.target.read_bytes(), pair.draft.read_bytes(), pair.medium) == (TARGET, DRAFT, None)
    assert dict(pair.recommended) == {"temperature": 0.7, "top_k": 40}
    assert models.registered_folders()["demo"] == home / "demo"


def test_an_unknown_name_suggests_the_nearest(home: Path):
    write_pair(home / "pair")
    with pytest.raises(ModelNotFound, match=r"'pare'.*did you mean 'pair'.*known names: demo, pair"):
        resolve("pare")


def test_paths(home: Path, tmp_path: Path):
    folder = write_pair(tmp_path / "elsewhere")
    assert resolve(str(folder)).draft == folder / "d.gguf"
    alone = resolve(str(folder / "t.gguf"))
    assert (alone.name, alone.target, alone.draft, alone.banner) == ("t", folder / "t.gguf", None, "")
    assert [file.sha256 for file in alone.files.values()] == [None]


def test_a_given_draft_replaces_the_pairs_own(home: Path, tmp_path: Path):
    write_pair(home / "pair")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"x")
    assert resolve("pair", other).draft == other
    assert resolve("pair").draft == home / "pair" / "d.gguf"
    for folder in (tmp_path, tmp_path / ("deep" * 50), tmp_path / "/".join(["deep"] * 300)):
        with pytest.raises(ModelNotFound, match=r"no draft .*absent\.gguf"):
            resolve("pair", folder / "absent.gguf")


def test_a_folder_that_is_given_as_draft_is_the_model_in_it(home: Path, tmp_path: Path):
    write_pair(home / "pair")
    assert resolve("pair", write_pair(tmp_path / "exported")).draft == tmp_path / "exported" / "t.gguf"
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "small.gguf").write_bytes(b"x")
    assert resolve("pair", tmp_path / "plain").draft == tmp_path / "plain" / "small.gguf"
    (tmp_path / "plain" / "small.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"holds no manifest.toml and no \.gguf"):
        resolve("pair", tmp_path / "plain")


@pytest.mark.parametrize("text", ["absent.gguf", "no/such/folder", "./demo2"])
def test_a_missing_path_is_not_taken_for_a_name(home: Path, text: str):
    with pytest.raises(ModelNotFound, match=r"no model .*or give a \.gguf or \.onnx file"):
        resolve(text)


def test_a_gguf_without_its_ending_runs(tmp_path: Path):
    """Ollama names its files by their checksum."""
    path = write_model(tmp_path / "tiny.gguf").rename(tmp_path / "sha256-0123")
    assert resolve(str(path)).target == path
    with edgespec.load(path, drafter="none", threads=1) as model:
        assert model.generate("Hi", options=edgespec.GenerateOptions(max_tokens=2, ignore_eos=True)).stats.new_tokens


def test_other_files_are_refused(home: Path, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"is not a \.gguf or \.onnx file.*export"):
        resolve(str(tmp_path / "model.safetensors"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFileError, match=r"holds no manifest\.toml and no \.gguf or \.onnx file"):
        resolve(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "format = 1\nname = "}, r"cannot be read: .*line 2"),
        ({"head": "format = 2"}, "format is 2; this edgespec reads 1"),
        ({"head": 'name = "pair"'}, "format is None"),
        ({"head": 'format = 1\ndescripton = "x"'}, "unknown field `descripton`"),
        ({"target": ""}, r"files\.target is missing"),
        ({"draft": '[files.draft]\npath = "d.gguf"\nbytes = 13'}, r"`sha256` - at `\$\.files"),
        ({"draft": file_table("draft", "../d.gguf", DRAFT)}, r"must stay inside the folder, got '\.\./d\.gguf'"),
    ],
)
def test_a_bad_manifest_names_file_and_key(home: Path, changes: dict[str, str], message: str):
    folder = write_pair(home / "pair", **changes)
    with pytest.raises(ModelFileError, match=message) as caught:
        resolve("pair")
    assert str(folder) in str(caught.value)


def test_missing_truncated_and_damaged_files(home: Path):
    folder = write_pair(home / "pair")
    (folder / "d.gguf").write_bytes(DRAFT[:-1])
    with pytest.raises(ModelFileError, match=r"d\.gguf has 12 bytes, the manifest says 13"):
        resolve("pair")
    (folder / "d.gguf").write_bytes(DRAFT[:-1] + b"!")
    with pytest.raises(ModelFileError, match=r"d\.gguf has SHA-256 .* the manifest says"):
        check_hash(resolve("pair").files["draft"])
    assert read_pair(folder).name == "pair"
    (folder / "d.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"d\.gguf is missing"):
        resolve("pair")

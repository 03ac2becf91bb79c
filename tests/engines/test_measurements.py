"""What is kept between runs: it comes back as it was, or counts as missing; nothing that is kept can fail a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import Seconds
from edgespec.platform.files import user_folder
from tiny_gguf import write_model


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    return tmp_path


def test_what_cannot_be_kept_leaves_nothing(home: Path) -> None:
    disk_cache.put("kind", "key", "\udcff")
    assert disk_cache.get("kind", "key") is None
    disk_cache.put("kind", "other", math.nan)
    assert disk_cache.get("kind", "other", float) is None
    assert not list(home.rglob("*.tmp"))


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "true", "Infinity", "[" * 100_000, "9" * 5000, '"1"', "0"])
def test_an_entry_of_another_shape_counts_as_missing(home: Path, text: str) -> None:
    disk_cache.put("kind", "key", 5)
    (home / "cache" / "kind" / "key.json").write_text(text)
    assert disk_cache.get("kind", "key", Seconds) is None


# -- a model whose every entry is odd


def _entries() -> list[Path]:
    return sorted(path for path in user_folder("cache").glob("*/*.json") if path.parent.name != "bench")


def _spoilt(value: Any) -> list[Any]:
    """Values as a version of this program with another format would have written them."""
    text = json.dumps(value)
    classes = {"pinned": [1, 100], "refuted": False}
    return [{}, [[100, 100]], classes, json.loads(f'{{"a": {text}}}')]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("kind", ["onnx", "llamacpp"])
def test_no_entry_can_fail_a_run(home: Path, kind: str, onnx_path: Path, target_path: Path) -> None:
    model = str(onnx_path if kind == "onnx" else target_path)

    def text() -> str:
        with edgespec.load(model, threads=TEST_THREADS, reproducible=True) as loaded:
            return loaded.generate("Hello, ", Sampling(seed=3), GenerateOptions(max_tokens=12)).text

    expected = text()
    entries = _entries()
    kinds = {path.parent.name for path in entries}
    assert len(kinds) >= 2 and kinds >= {"widths", "probed"}
    kept = {path: json.loads(path.read_bytes()) for path in entries}
    for number_of in range(len(_spoilt(None))):
        for path, entry in kept.items():
            value = _spoilt(entry)[number_of]
            disk_cache.put(path.parent.name, path.stem, value)
            assert disk_cache.get(path.parent.name, path.stem) == value
        assert text() == expected
        assert _entries() == entries, "all was measured anew"


# -- weights that give garbage


def test_weights_that_are_all_zero_are_refused(home: Path, tmp_path: Path) -> None:
    from edgespec.formats.gguf.header import read_header

    path = write_model(tmp_path / "zero.gguf")
    header = read_header(path)
    contents = bytearray(path.read_bytes())
    contents[header.data_start :] = bytes(len(contents) - header.data_start)
    path.write_bytes(contents)
    with pytest.raises(edgespec.EdgespecError, match="every token the same score"):
        edgespec.load(str(path), threads=TEST_THREADS)
    assert user_folder("cache") == home / "cache"

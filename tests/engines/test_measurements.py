"""What is kept between runs: it comes back as it was, or counts as missing; nothing that is kept can fail a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.engines.checks import fault_of
from edgespec.platform import disk_cache
from edgespec.platform import disk_cache as measurements
from edgespec.platform.disk_cache import (
    a_list,
    a_record,
    a_row,
    a_table,
    cache_folder,
    number,
    numbers,
    seconds,
    text,
    whole,
)
from tiny_gguf import write_model

VALUES: tuple[Any, ...] = (1, 0.1, "é\udcff", [1, [2.5, None]], {"a": {"b": [True]}}, {"1": 2})


def anything(value: Any) -> bool:
    return True


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("value", VALUES)
def test_what_was_kept_comes_back(home: Path, value: Any) -> None:
    disk_cache.put("kind", "key", value)
    assert disk_cache.get("kind", "key", anything) == value
    assert disk_cache.get("kind", "key", lambda value: False) is None
    assert disk_cache.get("kind", "other", anything) is None


def test_numbers_as_names_come_back_as_text(home: Path) -> None:
    disk_cache.put("kind", "key", {2: (1, 2), 10: (3,)})
    assert disk_cache.get("kind", "key", anything) == {"2": [1, 2], "10": [3]}


def test_what_json_cannot_say_is_not_kept_and_leaves_nothing(home: Path) -> None:
    disk_cache.put("kind", "key", [math.nan])
    disk_cache.put("kind", "key", math.inf)
    assert disk_cache.get("kind", "key", anything) is None
    assert not list(home.rglob("*.tmp"))


def test_every_changed_byte_is_noticed(home: Path) -> None:
    disk_cache.put("kind", "key", {"classes": [[1, 16]], "seconds": [[1, 0.25]]})
    file = home / "cache" / "kind" / "key.json"
    whole_file = file.read_bytes()
    before = disk_cache.get("kind", "key", anything)
    for place in range(len(whole_file)):
        for changed in (whole_file[:place] + b"7" + whole_file[place + 1 :], whole_file[:place]):
            file.write_bytes(changed)
            assert disk_cache.get("kind", "key", anything) in (None, before), changed


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "5", "Infinity", "[" * 100_000, "9" * 5000, '{"value": 1}'])
def test_an_entry_of_another_shape_counts_as_missing(home: Path, text: str) -> None:
    disk_cache.put("kind", "key", 5)
    (home / "cache" / "kind" / "key.json").write_text(text)
    assert disk_cache.get("kind", "key", anything) is None
    (home / "cache" / "kind" / "key.json").unlink()
    (home / "cache" / "kind" / "key.json").mkdir()
    assert disk_cache.get("kind", "key", anything) is None


NOT_NUMBERS: tuple[Any, ...] = (math.inf, math.nan, True, None, "1", [1], {})


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        (number(0, 2), (0, 1.5, 2), (-1, 3, *NOT_NUMBERS)),
        (whole(1, 64), (1, 64), (0, 65, 1.5, *NOT_NUMBERS)),
        (seconds, (1e-9, 5), (0, -1.0, 1e9, *NOT_NUMBERS)),
        (a_list(seconds), ([], [1], [1, 2]), ([0], {}, 5)),
        (a_list(seconds, size=2), ([1, 2],), ([1], [1, 2, 3])),
        (a_row(seconds, whole(1, 2)), ([0.5, 1],), ([], [0.5], [0.5, 3], [0.5, 1, 1])),
        (a_record({"a": seconds}), ({"a": 1},), ({}, {"a": 0}, {"a": 1, "b": 1}, [1])),
        (a_table(["1", "2"], seconds), ({"1": 1}, {"1": 1, "2": 1}), ({}, {"3": 1}, {"1": 0}, [1])),
        (numbers, ([], {}, [1, {"a": [2.5]}]), ([math.inf], ["1"], [[[[[[[[[[1]]]]]]]]]], {"a": None}, 10**400)),
        (a_record({"path": text}), ({"path": "x"},), ({}, {"path": 1}, [])),
    ],
)
def test_schemas(schema: Any, fitting: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    assert all(schema(value) for value in fitting)
    assert not any(schema(value) for value in others)


# -- a model whose every entry is odd


def _entries() -> list[Path]:
    return sorted(path for path in cache_folder().glob("*/*.json") if path.parent.name != "bench")


def _spoilt(value: Any) -> list[Any]:
    """Values that have a right checksum, as a version of this program with another format would have written them."""
    text = json.dumps(value)
    classes = {"classes": [[1, 100]], "seconds": [], "refuted": False}
    return [{}, [[100, 100]], classes, json.loads(f'{{"a": {text}}}')]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("kind", ["onnx", "llamacpp"])
def test_no_entry_can_fail_a_run(home: Path, kind: str, onnx_path: Path, target_path: Path) -> None:
    given: dict[str, Any] = {"cache_type_k": "int8", "cache_type_v": "int8"} if kind == "onnx" else {}
    model = str(onnx_path if kind == "onnx" else target_path)

    def text() -> str:
        with edgespec.load(model, threads=TEST_THREADS, reproducible=True, **given) as loaded:
            return loaded.generate("Hello, ", Sampling(seed=3), GenerateOptions(max_tokens=12)).text

    expected = text()
    entries = _entries()
    kinds = {path.parent.name for path in entries}
    assert len(kinds) >= 3 and kinds >= {"widths", "cache-scales" if kind == "onnx" else "probed"}
    kept = {path: json.loads(path.read_bytes()) for path in entries}
    for number_of in range(len(_spoilt(None))):
        for path, entry in kept.items():
            value = _spoilt(entry["value"])[number_of]
            disk_cache.put(path.parent.name, path.stem, value)
            assert disk_cache.get(path.parent.name, path.stem, anything) == value
        assert text() == expected
        assert _entries() == entries, "all was measured anew"


@pytest.mark.parametrize("scale", [0.0, 1e38, -1.0])
def test_scales_that_cannot_be_are_measured_anew(home: Path, onnx_path: Path, scale: float) -> None:
    def text() -> str:
        with edgespec.load(
            str(onnx_path), threads=TEST_THREADS, cache_type_k="int8", cache_type_v="int8", drafter="none"
        ) as model:
            return model.generate("Hello, ", Sampling(temperature=0.0), GenerateOptions(max_tokens=12)).text

    expected = text()
    (file,) = (cache_folder() / "cache-scales").glob("*.json")
    value = json.loads(file.read_bytes())["value"]
    spoilt = {name: [[scale] * len(head) for head in heads] for name, heads in value.items()}
    disk_cache.put("cache-scales", file.stem, spoilt)
    assert text() == expected


def test_a_kept_index_beyond_the_buckets_is_left_out(home: Path) -> None:
    from edgespec.control.confidence import BetaTable

    with pytest.raises(ValueError, match="impossible counts"):
        BetaTable().restore([[1.0, 100, 1.0, 2.0]])


# -- weights that give garbage


def test_logits_that_say_nothing_are_told() -> None:
    rows = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    assert fault_of(rows) == ""
    assert "same score" in fault_of(np.zeros_like(rows))
    assert "same score" in fault_of(np.where(np.arange(4)[:, None] == 2, np.float32(3), rows))
    assert "not numbers" in fault_of(np.where(np.arange(9) == 2, np.float32(np.nan), rows))


def test_weights_that_are_all_zero_are_refused(home: Path, tmp_path: Path) -> None:
    from edgespec.formats.gguf.header import read_header

    path = write_model(tmp_path / "zero.gguf")
    header = read_header(path)
    contents = bytearray(path.read_bytes())
    contents[header.data_start :] = bytes(len(contents) - header.data_start)
    path.write_bytes(contents)
    with pytest.raises(edgespec.EdgespecError, match="every token the same score"):
        edgespec.load(str(path), threads=TEST_THREADS)
    assert measurements.cache_folder() == home / "cache"

"""Texts that come with edgespec: read back for their own vocabulary only, and never in the way when damaged."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import numpy as np
import pytest

from edgespec.corpus.database import joined
from edgespec.corpus.index import sorted_places
from edgespec.corpus.shipped import TEXT, _checked, shipped_text, write_shipped
from edgespec.corpus.store import vocabulary_key
from edgespec.platform.files import shipped_models
from table_engine import LetterVocabulary

ROOT = Path(__file__).parents[2]
FILES = sorted(shipped_models().glob(f"*/{TEXT}"))
VOCABULARY = LetterVocabulary(26)
TEXTS = [np.random.default_rng(seed).integers(0, 20, 80).astype(np.int32) for seed in range(3)]


def written(folder: Path, key: str | None = None, size: int | None = None, highest: int = 20) -> Path:
    path = folder / "family" / TEXT
    path.parent.mkdir(exist_ok=True)
    tokens = joined([*TEXTS, np.array([highest - 1], np.int32)])
    write_shipped(path, tokens, sorted_places(tokens), key or vocabulary_key(VOCABULARY), size or VOCABULARY.size)
    return path


def test_the_text_of_the_vocabulary_is_indexed(tmp_path: Path) -> None:
    assert shipped_text(VOCABULARY, tmp_path) is None
    written(tmp_path)
    index = shipped_text(VOCABULARY, tmp_path)
    assert index is not None
    for text in TEXTS:
        span = index.find(text[40:44].tolist())
        assert span is not None and index.copied(span, 6) == text[44:50].tolist()


@pytest.mark.parametrize("other", [{"key": "another"}, {"size": VOCABULARY.size + 1}])
def test_another_vocabulary_has_none(tmp_path: Path, other: dict[str, object]) -> None:
    written(tmp_path, **other)  # type: ignore[arg-type]
    assert shipped_text(VOCABULARY, tmp_path) is None


def test_a_damaged_file_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, highest=VOCABULARY.size + 1)
    with caplog.at_level(logging.WARNING, "edgespec"):
        assert shipped_text(VOCABULARY, tmp_path) is None
        whole = written(tmp_path).read_bytes()
        for contents in (b"", b"not a file of arrays", whole[: len(whole) // 2], whole[:-40]):
            path.write_bytes(contents)
            assert shipped_text(VOCABULARY, tmp_path) is None
    assert len(caplog.records) == 5 and str(path) in caplog.text


def test_any_damaged_byte_is_survived(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        shipped_text(VOCABULARY, tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_what_is_shipped_is_sound_small_and_travels_with_the_package(path: Path) -> None:
    with np.load(path) as file:
        tokens, order = _checked(file["tokens"], file["order"], int(file["size"]))
    assert np.array_equal(order, sorted_places(tokens))
    assert path.stat().st_size < 20 << 20
    assert "Apache-2.0" in (path.parent / "NOTICE").read_text(encoding="utf-8")
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {f"models/{path.parent.name}/{name}" for name in (TEXT, "NOTICE")} <= set(included["force-include"])

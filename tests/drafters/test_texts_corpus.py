"""The corpus on disk: what is added comes back, within its budget; what is damaged is refused and never misread."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import numpy as np
import pytest

from damage import damaged
from edgespec.corpus import texts as module
from edgespec.corpus.index import joined, sorted_places
from edgespec.corpus.store import texts_folder, vocabulary_key
from edgespec.corpus.texts import Corpus, Documents
from edgespec.errors import ConfigError, StateError
from table_engine import LetterVocabulary
from waiting import until

SIZE = 1000
SPAWN = multiprocessing.get_context("spawn")


def make(folder: Path, size: int = SIZE) -> Corpus:
    return Corpus("key", size, folder)


def documents(seed: int, count: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, SIZE, 200).astype(np.int32) for _ in range(count)]


def test_what_was_added_is_indexed_and_listed(tmp_path: Path) -> None:
    corpus = make(tmp_path)
    assert corpus.texts() == [] and corpus.index() is None
    first, second = documents(0), documents(1)
    added = corpus.add("b", "/b", first)
    corpus.add("a", "/a", second)
    assert added.num_tokens == 603 and added.num_documents == 3
    assert [text.name for text in make(tmp_path).texts()] == ["a", "b"]
    index = make(tmp_path).index()
    assert index is not None and index.num_tokens == 1206
    for part in (*first, *second):
        span = index.find(part[50:54].tolist())
        assert span is not None and index.copied(span, 6) == part[54:60].tolist()
    assert all(file.stat().st_mode & 0o077 == 0 for file in corpus.path.iterdir()), "others may not read it"


def test_the_same_source_replaces_and_another_may_not_take_its_name(tmp_path: Path) -> None:
    corpus = make(tmp_path)
    corpus.add("a", "/a", documents(0))
    corpus.add("a", "/a", documents(1, count=1))
    assert [text.num_tokens for text in corpus.texts()] == [201]
    index = corpus.index()
    assert index is not None and index.num_tokens == 201
    with pytest.raises(ConfigError, match="already has a text 'a', from /a: give this one another name with --name"):
        corpus.add("a", "/elsewhere/a", documents(2))


def test_what_is_removed_is_not_drafted_from(tmp_path: Path) -> None:
    corpus = make(tmp_path)
    corpus.add("a", "/a", documents(0))
    corpus.add("b", "/b", documents(1))
    assert corpus.remove("a").name == "a"
    index = corpus.index()
    assert index is not None and index.find(documents(0)[0][:4].tolist()) is None
    with pytest.raises(ConfigError, match="the corpus has no 'a'; it has: b"):
        corpus.remove("a")
    corpus.remove("b")
    assert corpus.index() is None
    assert corpus.clear() and not corpus.clear()


def test_the_budget_is_kept_and_can_be_raised(tmp_path: Path) -> None:
    corpus = make(tmp_path)
    corpus.add("a", "/a", documents(0), budget_bytes=8 * 700)
    with pytest.raises(
        ConfigError, match=r"/b takes .* MiB .* budget of .* raise the budget with edgespec corpus add ... --budget 1"
    ):
        corpus.add("b", "/b", documents(1))
    assert [text.name for text in corpus.texts()] == ["a"]
    corpus.add("b", "/b", documents(1), budget_bytes=8 * 1300)
    assert corpus.budget_bytes() == 8 * 1300
    with pytest.raises(ConfigError):
        corpus.add("a", "/a", documents(0, count=9))
    index = corpus.index()
    assert index is not None and index.num_tokens == 1206, "a refused replacement leaves what was there"


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 101, "-a", "a\x1b[2J", "\u202egpj"])
def test_bad_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        make(tmp_path).add(name, "/a", documents(0))
    assert not make(tmp_path).path.exists()


def test_a_corpus_of_more_ids_than_the_vocabulary_has_is_refused(tmp_path: Path) -> None:
    make(tmp_path).add("a", "/a", documents(0))
    with pytest.raises(StateError, match=r"a token id is outside -1..49"):
        make(tmp_path, size=50).index()


def test_vocabularies_have_files_of_their_own() -> None:
    assert vocabulary_key(LetterVocabulary(10)) == vocabulary_key(LetterVocabulary(10))
    assert len({vocabulary_key(LetterVocabulary(size, end)) for size in (10, 11) for end in (None, 3)}) == 4


def test_any_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    """Bytes of a file are changed, or its end is cut off: what is loaded is what was added, or nothing."""
    corpus = make(tmp_path)
    corpus.add("a", "/a", documents(0))
    ids, rng, refused = joined(documents(0)), random.Random(0), 0
    for file in sorted(corpus.path.glob("*.npz")):
        whole = file.read_bytes()
        for _ in range(60):
            file.write_bytes(damaged(whole, rng))
            try:
                index = corpus.index()
            except StateError as exc:
                assert f"{file} is damaged, delete it" in str(exc)
                refused += 1
                continue
            assert index is not None and index.num_tokens == ids.size
            assert index._ids[: ids.size].tolist() == ids.tolist()
            assert index._order.tolist() == sorted_places(ids).tolist()
        file.write_bytes(whole)
    assert 20 < refused <= 60, "a damaged index is made anew"
    assert corpus.index() is not None and corpus.clear() and not corpus.clear()


def test_a_text_is_stored_beside_one_of_another_vocabulary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path).add("a", "/a", documents(0))
    corpus = make(tmp_path, size=50)
    assert corpus.add("b", "/b", [np.arange(40, dtype=np.int32)]).name == "b"
    assert "a token id is outside -1..49" in caplog.text
    corpus.remove("a")
    assert corpus.index() is not None and [text.name for text in corpus.texts()] == ["b"]
    (corpus.path / "budget.json").write_text("100")
    with pytest.raises(StateError, match=r"takes 0.0 MiB and its budget is 0.0 MiB"):
        corpus.index()
    (corpus.path / "budget.json").write_text("many")
    assert corpus.budget_bytes() == module.DEFAULT_BUDGET_BYTES


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    corpus = make(tmp_path / "file" / "texts")
    with pytest.raises(StateError, match=r"cannot be written: Not a directory"):
        corpus.add("a", "/a", documents(0))
    assert corpus.index() is None


def add_for_ever(folder: Path) -> None:
    number = 0
    while True:
        make(folder).add("growing", "/growing", documents(number % 7, count=200), budget_bytes=1 << 30)
        number += 1


def test_killed_while_writing(tmp_path: Path) -> None:
    make(tmp_path).add("a", "/a", documents(0))
    for delay_s in (0.1, 0.17, 0.31):
        worker = SPAWN.Process(target=add_for_ever, args=(tmp_path,))
        worker.start()
        until(lambda: any(text.name == "growing" for text in make(tmp_path).texts()))
        time.sleep(delay_s)  # to kill it at several moments; every one will do
        worker.kill()
        worker.join(60)
        index = make(tmp_path).index()
        assert index is not None and index.find(documents(0)[0][:4].tolist()) is not None
        assert {text.name for text in make(tmp_path).texts()} == {"a", "growing"}
        make(tmp_path).remove("growing")


def test_files_that_are_no_text_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.corpus.texts.MAX_FILE_BYTES", 1 << 20)
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, contents in {
        "a.py": b"x = 1\n",
        "sub/b.md": "Grüße".encode(),
        "sub/bom.txt": b"\xef\xbb\xbfhello",
        ".hidden": b"secret",
        ".git/config": b"secret",
        "image.png": b"\x89PNG\0\0",
        "latin.txt": b"gr\xfc\xdfe",
        "empty.txt": b"",
        "blank.txt": b" \n",
    }.items():
        (tmp_path / name).write_bytes(contents)
    (tmp_path / "large.txt").write_bytes(b"a" * ((1 << 20) + 1))
    (tmp_path / "link.txt").symlink_to("a.py")
    found = Documents(tmp_path)
    texts = {str(path.relative_to(tmp_path)): text for path, text in found}
    assert texts == {"a.py": "x = 1\n", "sub/b.md": "Grüße", "sub/bom.txt": "hello"}
    assert found.left_out == {"binary": 1, "not UTF-8": 1, "empty": 2, "a link": 1, "larger than 1 MiB": 1}
    with pytest.raises(ConfigError, match=r"image.png is binary: give a file of text"):
        list(Documents(tmp_path / "image.png"))
    with pytest.raises(ConfigError, match="no file or folder"):
        Documents(tmp_path / "nothing")


def test_texts_lie_in_the_users_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    assert texts_folder() == tmp_path / "texts"
    monkeypatch.delenv("EDGESPEC_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert texts_folder() == tmp_path / "data" / "edgespec" / "texts"

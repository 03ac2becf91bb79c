"""The corpus on disk: what is added comes back, within its limit; what is damaged is refused and never misread."""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from damage import damaged
from edgespec.corpus.index import joined, sorted_places
from edgespec.corpus.texts import Corpus, Documents, texts_folder, vocabulary_key
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
    assert corpus.path.stat().st_mode & 0o077 == 0, "others may not read it"


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
    assert corpus.index() is None and not corpus.clear()


def test_the_limit_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.corpus.texts.MAX_BYTES", 8 * 700)
    corpus = make(tmp_path)
    corpus.add("a", "/a", documents(0))
    for name, count in (("b", 3), ("a", 9)):
        with pytest.raises(ConfigError, match=rf"with /{name} the corpus would take more than 0 MiB, 8 bytes a token"):
            corpus.add(name, f"/{name}", documents(1, count))
    index = corpus.index()
    assert index is not None and index.num_tokens == 603, "what is refused leaves what was there"


@pytest.mark.parametrize("name", ["", "a\n", "x" * 101, "-a", "\u202egpj"])
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
    """Bytes of the file are changed, or its end is cut off: what is loaded is what was added, or nothing."""
    corpus = make(tmp_path)
    corpus.add("a", "/a", documents(0))
    ids, rng, refused = joined(documents(0)), random.Random(0), 0
    whole = corpus.path.read_bytes()
    for _ in range(120):
        corpus.path.write_bytes(damaged(whole, rng))
        try:
            index = corpus.index()
        except StateError as exc:
            assert f"{corpus.path} is damaged, delete it" in str(exc)
            refused += 1
            continue
        assert index is not None and index.num_tokens == ids.size
        assert index._ids[: ids.size].tolist() == ids.tolist()
        assert index._order.tolist() == sorted_places(ids).tolist()
    assert refused > 40
    corpus.path.write_bytes(b"garbage")
    with pytest.raises(StateError, match="is damaged, delete it"):
        corpus.add("b", "/b", documents(1))
    assert corpus.clear() and not corpus.clear()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    corpus = make(tmp_path / "file" / "texts")
    with pytest.raises(StateError, match=r"cannot be written: Not a directory"):
        corpus.add("a", "/a", documents(0))
    assert corpus.index() is None


def add_for_ever(folder: Path) -> None:
    number = 0
    while True:
        make(folder).add("growing", "/growing", documents(number % 7, count=200))
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


def add_on_a_full_disk(folder: Path) -> None:
    """The kernel refuses to let any file of this process grow beyond 40 kB, as a full disk would."""
    make(folder).add("a", "/a", documents(0))
    import resource  # not there on Windows

    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    try:
        make(folder).add("large", "/large", documents(1, count=100))
    except StateError as exc:
        assert "disk" in str(exc), exc
    else:
        raise AssertionError("it was written all the same")
    assert [text.name for text in make(folder).texts()] == ["a"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no file's size")
def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    worker = SPAWN.Process(target=add_on_a_full_disk, args=(tmp_path,))
    worker.start()
    worker.join(120)
    assert worker.exitcode == 0
    index = make(tmp_path).index()
    assert index is not None and index.num_tokens == 603


def test_files_that_are_no_text_are_left_out_and_counted(tmp_path: Path) -> None:
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
    (tmp_path / "link.txt").symlink_to("a.py")
    found = Documents(tmp_path)
    assert list(found) == ["x = 1\n", "Grüße", "hello"] and found.num_left_out == 5


def test_a_named_file_that_is_no_text_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.corpus.texts.MAX_FILE_BYTES", 1 << 20)
    for name, contents in {"image.png": b"\x89PNG\0\0", "large.txt": b"a" * ((1 << 20) + 1)}.items():
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(ConfigError, match=rf"{name} holds no text: give a file of text"):
            list(Documents(tmp_path / name))
    with pytest.raises(ConfigError, match="no file or folder"):
        Documents(tmp_path / "nothing")


def test_texts_lie_in_the_users_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    assert texts_folder() == tmp_path / "texts"
    monkeypatch.delenv("EDGESPEC_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert texts_folder() == tmp_path / "data" / "edgespec" / "texts"

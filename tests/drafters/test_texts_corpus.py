"""Texts to draft from, on disk: the corpus, its index against plain searches, and kept answers."""

from __future__ import annotations

import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from damage import damaged
from edgespec.corpus import index
from edgespec.corpus.index import DEPTH, END_OF_TEXT, LONGEST_MATCH, SuffixIndex, joined, sorted_places
from edgespec.corpus.texts import MAX_ANSWER_TOKENS, Corpus, Documents, LearntTexts, vocabulary_key
from edgespec.drafters.suffix import CorpusMatch
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


# -- the suffix index against plain searches


def places_of(ids: list[int], wanted: list[int]) -> list[int]:
    return [i for i in range(len(ids) - len(wanted) + 1) if ids[i : i + len(wanted)] == wanted]


def longest_end(ids: list[int], text: list[int], most: int = LONGEST_MATCH) -> int:
    lengths = range(min(most, len(text)), 0, -1)
    return next((length for length in lengths if places_of(ids, text[len(text) - length :])), 0)


def random_corpus(rng: random.Random, size: int) -> list[int]:
    return [rng.choice((END_OF_TEXT, 0, 1, 2)) for _ in range(size)]


@pytest.mark.parametrize("packed_bits", [63, 0])
def test_places_are_sorted_by_what_follows(packed_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_PACKED_BITS", packed_bits)
    rng = random.Random(0)
    for size in (0, 1, 2, 3, 50, 300):
        ids = random_corpus(rng, size) + [5] * (size // 3)
        order = sorted_places(np.array(ids, np.int32)).tolist()
        assert sorted(order) == list(range(len(ids)))
        texts = [(ids[place:] + [END_OF_TEXT] * DEPTH)[:DEPTH] for place in order]
        cut = [text[: text.index(END_OF_TEXT)] if END_OF_TEXT in text else text for text in texts]
        assert cut == sorted(cut)


@pytest.mark.parametrize("seed", range(40))
def test_finding_and_following_are_those_of_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    ids = random_corpus(rng, rng.randint(1, 60))
    found = SuffixIndex.of(np.array(ids, np.int32))
    text = [rng.randint(0, 3) for _ in range(12)]
    span = found.longest_end(text)
    length = longest_end(ids, text)
    assert (0 if span is None else span.length) == length
    if span is None:
        return
    end = text[len(text) - length :]
    assert span.high - span.low == len(places_of(ids, end))
    after = Counter((*ids, END_OF_TEXT)[place + length] for place in places_of(ids, end))
    token_id, share = found.next_token(span)
    assert after[token_id] == max(after.values())
    if span.high - span.low <= 32:
        assert share == after[token_id] / after.total()
    copied = found.copied(span, 5)
    assert END_OF_TEXT not in copied
    assert places_of([*ids, END_OF_TEXT], end + copied)


@pytest.mark.parametrize("seed", range(40))
def test_a_match_that_is_kept_up_to_date_is_the_longest(seed: int) -> None:
    rng = random.Random(seed)
    ids = random_corpus(rng, 80)
    match = CorpusMatch(SuffixIndex.of(np.array(ids, np.int32)))
    text: list[int] = []
    while len(text) < 120:
        text += [rng.randint(0, 3) for _ in range(rng.choice((1, 1, 2, 5, 40)))]
        match.follow(text)
        assert match.length == longest_end(ids, text)
    match.restart()
    assert match.length == 0 and list(match.continued(4)) == []
    match.follow([2])
    assert match.length == (2 in ids)


def test_a_long_copy_is_followed_to_its_end_at_any_depth() -> None:
    """Matches are cut at their longest and grow again; a draft reaches beyond the depth to which places are sorted."""
    ids = np.random.default_rng(0).integers(0, 10_000, 600).astype(np.int32)
    match = CorpusMatch(SuffixIndex.of(np.append(ids, np.int32(END_OF_TEXT))))
    for end in range(4, 600):
        match.follow(ids[:end].tolist())
        assert LONGEST_MATCH >= match.length >= min(end, LONGEST_MATCH // 2)
        drafted = [token_id for token_id, *_ in match.continued(100)]
        assert drafted == ids[end : end + 100].tolist()


def test_the_commonest_continuation_is_chosen_from_any_number_of_places() -> None:
    ids = [1, 2, 3] * 500 + [1, 2, 4] * 100 + [END_OF_TEXT]
    found = SuffixIndex.of(np.array(ids, np.int32))
    span = found.find([1, 2])
    assert span is not None and span.high - span.low == 600
    token_id, share = found.next_token(span)
    assert token_id == 3 and abs(share - 5 / 6) < 0.05


def test_strings_that_no_text_holds() -> None:
    found = SuffixIndex.of(np.array([1, 2, END_OF_TEXT, 3, 4, END_OF_TEXT], np.int32))
    assert found.find([2, 3]) is None  # across the border of two texts
    assert found.find([9]) is None and found.find([0]) is None and found.find([1, 9, 2]) is None
    span = found.find([2])
    assert span is not None and found.copied(span, 3) == []
    empty = SuffixIndex.of(np.empty(0, np.int32))
    assert empty.longest_end([1, 2]) is None and empty.num_tokens == 0


def test_narrowing_stops_at_the_depth_to_which_places_are_sorted() -> None:
    found = SuffixIndex.of(np.zeros(200, np.int32))
    span = found.find([0] * DEPTH)
    assert span is not None and span.length == DEPTH
    assert found.narrowed(span, 0) is None
    match = CorpusMatch(found)
    match.follow([0] * 40)
    assert [token_id for token_id, *_ in match.continued(64)] == [0] * 64


# -- what models wrote, on disk: bounded, safe with several processes, and never in the way


LEARNT_SIZE = 1000


def learnt_in(folder: Path, **limits: int) -> LearntTexts:
    return LearntTexts("key", LEARNT_SIZE, folder=folder, **limits)


def answer(seed: int, size: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, LEARNT_SIZE, size).astype(np.int32)


def test_answers_come_back_the_oldest_first(tmp_path: Path) -> None:
    """An answer is kept once and counts as new; short ones are not kept, long ones are cut, the oldest go."""
    learnt = learnt_in(tmp_path, max_tokens=220)

    def has(*seeds: int) -> bool:
        return [ids.tolist() for ids in learnt_in(tmp_path).read()] == [answer(seed).tolist() for seed in seeds]

    learnt.add(answer(0, 3))
    assert not learnt.path.exists() and has()
    for seed in (3, 1, 2, 1):
        learnt.add(answer(seed))
    assert has(3, 2, 1)
    for seed in range(4, 9):
        learnt.add(answer(seed))
    assert has(5, 6, 7, 8)
    assert learnt.path.stat().st_mode & 0o077 == 0, "others may not read it"
    assert learnt.clear() and not learnt.clear() and learnt.read() == []
    whole = learnt_in(tmp_path)
    whole.add(answer(0, MAX_ANSWER_TOKENS + 5))
    assert [ids.size for ids in whole.read()] == [MAX_ANSWER_TOKENS]


def test_any_damage_gives_what_was_written_or_less(tmp_path: Path) -> None:
    learnt = learnt_in(tmp_path)
    for seed in range(20):
        learnt.add(answer(seed, 300))
    whole = learnt.path.read_bytes()
    written = {tuple(answer(seed, 300).tolist()) for seed in range(20)}
    rng = random.Random(0)
    lost = 0
    for _ in range(120):
        learnt.path.write_bytes(damaged(whole, rng))
        found = {tuple(ids.tolist()) for ids in learnt.read()}
        assert found <= written
        lost += len(found) < 20
        learnt.add(answer(50))
        assert learnt.read()[-1].tolist() == answer(50).tolist(), "a damaged file is replaced"
    assert lost > 40


def test_ids_of_another_vocabulary_are_left_out(tmp_path: Path) -> None:
    learnt_in(tmp_path).add(answer(0))
    assert LearntTexts("key", 10, folder=tmp_path).read() == []


def test_a_place_that_cannot_be_used_is_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edgespec")
    (tmp_path / "file").write_text("")
    learnt = learnt_in(tmp_path / "file" / "texts")
    learnt.add(answer(0))
    assert learnt.read() == []
    assert "this answer was not stored" in caplog.text

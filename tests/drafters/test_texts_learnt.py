"""What models wrote, on disk: bounded, safe with several processes, and never in the way."""

from __future__ import annotations

import logging
import multiprocessing
import random
import sqlite3
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from damage import changing, damaged
from edgespec.corpus.learnt import MAX_ANSWER_TOKENS, LearntTexts
from waiting import until

SIZE = 1000
SPAWN = multiprocessing.get_context("spawn")


def make(folder: Path, **limits: float) -> LearntTexts:
    return LearntTexts("key", SIZE, folder=folder, **limits)  # type: ignore[arg-type]


def answer(seed: int, size: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SIZE, size).astype(np.int32)


def test_answers_come_back_the_oldest_first(tmp_path: Path) -> None:
    learnt = make(tmp_path)
    assert learnt.read() == [] and learnt.kept() == (0, 0)
    for seed in (3, 1, 2):
        learnt.add(answer(seed))
    assert [ids.tolist() for ids in make(tmp_path).read()] == [answer(seed).tolist() for seed in (3, 1, 2)]
    assert learnt.kept() == (3, 150)
    assert learnt.path.stat().st_mode & 0o077 == 0, "others may not read it"
    assert learnt.clear() and not learnt.clear() and learnt.read() == []


def test_the_same_answer_is_kept_once_and_counts_as_new(tmp_path: Path) -> None:
    learnt = make(tmp_path)
    for seed in (1, 2, 1):
        learnt.add(answer(seed))
    assert [ids.tolist() for ids in learnt.read()] == [answer(2).tolist(), answer(1).tolist()]


def test_short_answers_are_not_kept_and_long_ones_are_cut(tmp_path: Path) -> None:
    learnt = make(tmp_path)
    learnt.add(answer(0, 3))
    assert not learnt.path.exists()
    learnt.add(answer(0, MAX_ANSWER_TOKENS + 5))
    assert learnt.kept() == (1, MAX_ANSWER_TOKENS)


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    learnt = make(tmp_path, max_tokens=220)
    for seed in range(9):
        learnt.add(answer(seed))
    assert [ids.tolist() for ids in learnt.read()] == [answer(seed).tolist() for seed in (5, 6, 7, 8)]
    assert make(tmp_path, max_tokens=100).read()[-1].tolist() == answer(8).tolist()
    assert len(make(tmp_path, max_tokens=100).read()) == 2, "a smaller bound holds at once"


def test_the_file_stays_small_when_the_oldest_go(tmp_path: Path) -> None:
    learnt = make(tmp_path, max_tokens=2000)
    sizes = []
    for seed in range(120):
        learnt.add(answer(seed))
        sizes.append(learnt.path.stat().st_size)
    assert max(sizes[60:]) <= 1.2 * sizes[45]


def test_old_answers_go(tmp_path: Path) -> None:
    learnt = make(tmp_path)
    learnt.add(answer(0))
    with changing(learnt.path) as connection:
        connection.execute("UPDATE answers SET made = made - 1000")
    connection.close()
    make(tmp_path, max_age_s=900.0).add(answer(1))
    assert [ids.tolist() for ids in learnt.read()] == [answer(1).tolist()]


def write_answers(folder: Path, first: int) -> None:
    for seed in range(first, first + 25):
        make(folder).add(answer(seed))
        make(folder).read()


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    workers = [SPAWN.Process(target=write_answers, args=(tmp_path, first)) for first in (0, 100, 200, 300)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    assert [worker.exitcode for worker in workers] == [0] * 4
    found = {tuple(ids.tolist()) for ids in make(tmp_path).read()}
    assert found == {tuple(answer(first + i).tolist()) for first in (0, 100, 200, 300) for i in range(25)}


def write_for_ever(folder: Path) -> None:
    seed = 0
    while True:
        make(folder).add(answer(seed, 5000))
        seed += 1


def test_killed_while_writing(tmp_path: Path) -> None:
    for delay_s in (0.05, 0.11, 0.23):
        worker = SPAWN.Process(target=write_for_ever, args=(tmp_path,))
        worker.start()
        until(lambda: make(tmp_path).read())
        time.sleep(delay_s)  # to kill it at several moments; every one will do
        worker.kill()
        worker.join(60)
        found = make(tmp_path).read()
        assert found, "what was kept before is still there"
        unknown = {ids.tobytes() for ids in found}
        for seed in range(3000):  # older ones have made room for newer ones meanwhile
            unknown.discard(answer(seed, 5000).astype(np.int32).tobytes())
            if not unknown:
                break
        assert not unknown, "nothing is there that was not written whole"
        make(tmp_path).add(answer(0, 10))
        assert len(make(tmp_path).read()) == len(found) + 1
        make(tmp_path).clear()


def write_on_a_full_disk(folder: Path) -> None:
    make(folder).add(answer(0))
    import resource  # not there on Windows

    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    make(folder).add(answer(1, 10_000))
    assert [ids.tolist() for ids in make(folder).read()] == [answer(0).tolist()]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no file's size")
def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    worker = SPAWN.Process(target=write_on_a_full_disk, args=(tmp_path,))
    worker.start()
    worker.join(120)
    assert worker.exitcode == 0
    assert [ids.tolist() for ids in make(tmp_path).read()] == [answer(0).tolist()]


def test_a_damaged_file_is_replaced_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edgespec")
    learnt = make(tmp_path)
    for contents in (b"no database at all", b"SQLite format 3\0" + b"\1" * 5000):
        learnt.path.write_bytes(contents)
        assert learnt.read() == []
        assert "is damaged" in caplog.text and "it is replaced by a new file" in caplog.text
        learnt.add(answer(0))
        assert len(learnt.read()) == 1


def test_any_damage_gives_what_was_written_or_less(tmp_path: Path) -> None:
    learnt = make(tmp_path)
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
        learnt.clear()
    assert lost > 40


def test_ids_of_another_vocabulary_are_left_out(tmp_path: Path) -> None:
    make(tmp_path).add(answer(0))
    assert LearntTexts("key", 10, folder=tmp_path).read() == []


def test_a_place_that_cannot_be_used_is_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edgespec")
    (tmp_path / "file").write_text("")
    learnt = make(tmp_path / "file" / "texts")
    learnt.add(answer(0))
    assert learnt.read() == []
    assert "this answer was not stored" in caplog.text


def test_a_locked_file_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.corpus.learnt._TIMEOUT_S", 0.05)
    learnt = make(tmp_path)
    learnt.add(answer(0))
    connection = sqlite3.connect(learnt.path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    learnt.add(answer(1))
    assert learnt.read() == []
    connection.close()
    assert len(learnt.read()) == 1


def test_a_later_format_is_left_alone(tmp_path: Path) -> None:
    learnt = make(tmp_path)
    learnt.add(answer(0))
    with changing(learnt.path) as connection:
        connection.execute("PRAGMA user_version=2")
    connection.close()
    before = learnt.path.read_bytes()
    assert learnt.read() == []
    learnt.add(answer(1))
    assert learnt.path.read_bytes() == before


@pytest.mark.parametrize("tokens", ["many", b"x", None, 9e999, 2**62, -3])
def test_a_row_that_another_program_wrote_is_counted_and_spoils_nothing(tmp_path: Path, tokens: object) -> None:
    learnt = LearntTexts("key", 100, folder=tmp_path)
    learnt.add(np.arange(8, dtype=np.int32))
    with changing(learnt.path) as connection:
        for number in range(3):
            connection.execute("INSERT INTO answers VALUES (?, ?, ?, ?)", (bytes([number]), "soon", tokens, 5))
    kept = learnt.kept()
    assert isinstance(kept.num_tokens, int) and kept.num_answers == 4
    learnt.add(np.arange(9, dtype=np.int32))
    assert [ids.size for ids in learnt.read()][-1] == 9

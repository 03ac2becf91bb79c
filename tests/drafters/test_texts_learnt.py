"""What models wrote, on disk: bounded, safe with several processes, and never in the way."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest

from damage import damaged
from edgespec.corpus.texts import MAX_ANSWER_TOKENS, LearntTexts

SIZE = 1000


def make(folder: Path, **limits: int) -> LearntTexts:
    return LearntTexts("key", SIZE, folder=folder, **limits)


def answer(seed: int, size: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SIZE, size).astype(np.int32)


def test_answers_come_back_the_oldest_first(tmp_path: Path) -> None:
    learnt = make(tmp_path)
    assert learnt.read() == []
    for seed in (3, 1, 2):
        learnt.add(answer(seed))
    assert [ids.tolist() for ids in make(tmp_path).read()] == [answer(seed).tolist() for seed in (3, 1, 2)]
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
    assert [ids.size for ids in learnt.read()] == [MAX_ANSWER_TOKENS]


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    learnt = make(tmp_path, max_tokens=220)
    for seed in range(9):
        learnt.add(answer(seed))
    assert [ids.tolist() for ids in learnt.read()] == [answer(seed).tolist() for seed in (5, 6, 7, 8)]


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
        assert learnt.read()[-1].tolist() == answer(50).tolist(), "a damaged file is replaced"
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

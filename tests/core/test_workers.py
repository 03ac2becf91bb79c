"""Tests in several processes: how many there are, and who waits for whom."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import workers
from waiting import until
from workers import Turns, wanted_processes

if sys.platform != "win32":
    import fcntl

GIB = 1 << 30
pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no locks for this")


@pytest.mark.parametrize(
    ("cores", "free_bytes", "arguments", "expected"),
    [
        (2, 23 * GIB, ["tests"], 2),
        (16, 23 * GIB, ["tests"], 7),
        (2, 4 * GIB, ["tests"], 0),
        (1, 23 * GIB, ["tests"], 0),
        (8, None, ["tests/core", "tests/cli"], 8),
        (8, 64 * GIB, [f"{__file__}::test_who_is_alone_waits_for_all_and_keeps_the_next_out"], 0),
        (8, 64 * GIB, [__file__, __file__], 8),
    ],
)
def test_each_process_has_a_core_and_memory(
    monkeypatch: pytest.MonkeyPatch, cores: int, free_bytes: int | None, arguments: list[str], expected: int
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(workers, "physical_cores", lambda: cores)
    monkeypatch.setattr(workers, "free_memory", lambda: free_bytes)
    assert wanted_processes(arguments) == expected
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "5")
    assert wanted_processes(arguments) == 5


def test_who_is_alone_waits_for_all_and_keeps_the_next_out(tmp_path: Path) -> None:
    first, second, measuring = (Turns(tmp_path) for _ in range(3))
    order: list[str] = []

    def starts(name: str, turns: Turns, *, alone: bool) -> threading.Thread:
        def run() -> None:
            turns.begin(alone=alone)
            order.append(name)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def is_locked(name: str) -> Callable[[], bool]:
        def look() -> bool:
            with (tmp_path / name).open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    return True
            return False

        return look

    for turns in (first, second):
        turns.begin(alone=False)  # beside one another
    alone = starts("measuring", measuring, alone=True)
    until(is_locked("door"))
    first.end(goes_on=False)
    again = starts("first", first, alone=False)
    assert order == []
    second.end(goes_on=False)
    alone.join(60)
    measuring.end(goes_on=True)
    measuring.begin(alone=True)
    assert order == ["measuring"] and is_locked("room")()
    measuring.end(goes_on=False)
    again.join(60)
    assert order == ["measuring", "first"]
    for turns in (first, second, measuring):
        turns.close()

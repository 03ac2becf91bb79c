"""Tests in several processes at once (pytest-xdist): how many, and how a test that measures keeps the others waiting.

Each test holds one lock together with others, or alone if it is marked `quiet`. So there is one run with one summary,
and `-k`, `-x` or `--junitxml` mean what they always do, which a second run for these tests would change.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from edgespec.platform.machine import physical_cores
from edgespec.platform.memory import free_memory

if sys.platform != "win32":
    import fcntl

MEMORY_BYTES = 3 << 30  # of a process and of what its tests start: the largest exports and two loaded pairs


def wanted_processes(arguments: list[str]) -> int:
    """For `-n auto`: a core and memory for each; 0: this process alone. Windows has no locks for `Turns`."""
    if asked := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", ""):
        return int(asked)
    is_one_file = len(arguments) == 1 and Path(arguments[0].partition("::")[0]).is_file()
    free_bytes = free_memory()
    fitting = physical_cores() if free_bytes is None else min(physical_cores(), free_bytes // MEMORY_BYTES)
    return 0 if is_one_file or os.name == "nt" or fitting < 2 else fitting


class Turns:
    """Of one worker: it runs tests beside the others, or while they wait. `folder` is the same for all of them."""

    def __init__(self, folder: Path) -> None:
        self._door, self._room = ((folder / name).open("w") for name in ("door", "room"))
        self._is_alone = False

    def begin(self, *, alone: bool) -> None:
        """Wait until the test may run."""
        if alone and self._is_alone:
            return
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        fcntl.flock(self._door, kind)  # who waits for an empty room lets nobody else in
        try:
            fcntl.flock(self._room, kind)
            self._is_alone = alone
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)

    def end(self, *, goes_on: bool) -> None:
        """`goes_on`: the next test needs to be alone too, so that the others need not stop twice."""
        if not (self._is_alone and goes_on):
            self._is_alone = False
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        self._door.close()
        self._room.close()

"""A control group of our own with a memory limit, below the one that this process is in; for measurements and tests."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

_MOUNTED, _GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_EMPTY_S = 5.0  # in which the processes of a group must have ended


class NoGroup(Exception):
    """This system lets us make no such group; says what was tried."""


@dataclass(frozen=True)
class MemoryGroup:
    """`folder` of the group; `is_second`: of control groups version 2."""

    folder: Path
    is_second: bool

    def enter(self, process: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(process))

    @property
    def peak_bytes(self) -> int | None:
        """The most that the group was charged with, caches of files included; None where the kernel does not tell."""
        name = "memory.peak" if self.is_second else "memory.max_usage_in_bytes"
        with suppress(OSError, ValueError):
            return int((self.folder / name).read_text())
        return None

    @property
    def kills(self) -> int:
        """Processes that the kernel ended for want of memory."""
        name = "memory.events" if self.is_second else "memory.oom_control"
        words = (self.folder / name).read_text().split()
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group that is removed afterwards; no process is in it yet. Raises NoGroup."""
    parent, is_second = _own_group()
    folder = parent / f"edgespec-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    limit_file = folder / ("memory.max" if is_second else "memory.limit_in_bytes")
    try:
        folder.mkdir()
    except OSError as exc:
        raise NoGroup(f"mkdir {folder}: {exc.strerror}") from exc
    try:
        try:
            limit_file.write_text(str(limit_bytes))
        except OSError as exc:
            raise NoGroup(f"write {limit_file}: {exc.strerror}") from exc
        yield MemoryGroup(folder, is_second)
    finally:
        end_s = monotonic() + _EMPTY_S
        while monotonic() < end_s:
            try:
                folder.rmdir()
                break
            except OSError:  # a process of it is still ending
                sleep(0.02)


def _own_group() -> tuple[Path, bool]:
    """The folder of the memory group of this process, and whether it is of version 2."""
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError as exc:
        raise NoGroup(f"read {_GROUPS}: {exc.strerror}") from exc
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _MOUNTED / "memory" / path.strip("/"), False
    for line in lines:
        number, controllers, path = line.split(":", 2)
        folder = _MOUNTED / path.strip("/")
        if number == "0" and not controllers and (folder / "cgroup.subtree_control").exists():
            if "memory" not in (folder / "cgroup.subtree_control").read_text().split():
                raise NoGroup(f"{folder}/cgroup.subtree_control has no memory: run in a scope that delegates it")
            return folder, True
    raise NoGroup(f"{_GROUPS} names no group with a memory controller")

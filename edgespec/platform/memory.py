"""Memory: what the machine, control groups and resource limits leave to this process, and the pairs it holds.

Several pairs in one process share its memory, so what pairs loaded later were planned to take is added to a budget.
The limits of the machine and of its control groups are read again at every check, since they and other programs change.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal
from weakref import WeakSet

from edgespec.errors import CapabilityError

Kind = Literal["memory", "data", "addresses"]
_ARENA_MAX = -8  # of glibc's malloc.h
_LOOK_EVERY_S = 1.0
LEAST_FREE_BYTES = 8 << 20  # with less left, the next allocation may end the process
_NO_LIMIT = 1 << 60  # control groups of version 1 write a number for "no limit"


@dataclass(frozen=True, slots=True)
class Limit:
    """`free_bytes` are left, of which `swap_bytes` on a disk. `name`: what limits them, for people.

    `kind`: memory that must exist; data, private addresses (`ulimit -d`); addresses, mapped files included.
    """

    kind: Kind
    free_bytes: int
    name: str
    swap_bytes: int = 0


def limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """All limits that this system reports; `root`: where /proc and /sys are found."""
    return (*_of_machine(root), *_of_groups(root), *_of_resources(root))


def require_left(what: str, num_bytes: int) -> None:
    """Raise CapabilityError where a resource limit leaves less: a library that gets no memory may end the process."""
    for each in _of_resources(Path("/")):
        if each.free_bytes < num_bytes:
            needed, left = num_bytes >> 20, each.free_bytes >> 20
            raise CapabilityError(
                f"{what} needs {needed} MiB more memory, {left} MiB is left under {each.name}: raise it"
            )


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that are available without swapping; None if the system does not report that."""
    found = [each.free_bytes - each.swap_bytes for each in limits(root) if each.kind == "memory"]
    return max(min(found), 0) if found else None


def least_free(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still take before something fails, swap included; None where unknown."""
    return min((each.free_bytes for each in limits(root) if each.kind != "addresses"), default=None)


def own_bytes() -> int | None:
    """Memory of this process that is no file's, now; cheap enough for every second. None where unknown.

    Of Windows what was committed: telling what of it was used would take it through every page.
    """
    if sys.platform == "linux":  # without psutil, whose import takes longer than all else here
        pages = system_text(Path("/proc/self/statm")).split()  # in all, resident, shared, ...
        return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE") if pages else None
    import psutil

    try:
        process = psutil.Process()
        is_windows = sys.platform == "win32"
        return int(process.memory_info().private if is_windows else process.memory_full_info().uss)
    except psutil.Error:
        return None


def return_freed_memory() -> None:
    """Give freed memory back to the system where the allocator would keep it for later (glibc)."""
    _tell_allocator("malloc_trim", 0)


def keep_one_arena() -> None:
    """Have threads that are started from now on allocate where the first one does (glibc).

    Each would reserve 64 MiB of addresses for an arena of its own, which a limit of addresses counts.
    """
    _tell_allocator("mallopt", _ARENA_MAX, 1)


def _tell_allocator(name: str, *arguments: int) -> None:
    if sys.platform == "linux" and (function := getattr(ctypes.CDLL(None), name, None)) is not None:
        function(*arguments)


def _of_machine(root: Path) -> Iterator[Limit]:
    found = sizes(root / "proc/meminfo")
    if "MemAvailable" in found:
        swap = found.get("SwapFree", 0)
        yield Limit("memory", found["MemAvailable"] + swap, "what the machine has free", swap)
    elif sys.platform != "linux":
        import psutil  # Linux does without

        yield Limit("memory", psutil.virtual_memory().available, "what the machine has free")


def sizes(path: Path) -> dict[str, int]:
    """The sizes listed in a file of /proc, in bytes; none where there is no such file."""
    pairs = (line.partition(":") for line in system_text(path).splitlines() if line.endswith("kB"))
    return {name: int(size.split()[0]) << 10 for name, _, size in pairs}


def system_text(path: Path) -> str:
    """The text of a file of /proc or /sys; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _of_groups(root: Path) -> Iterator[Limit]:
    """The tightest limit among this process's control groups and their ancestors."""
    left = [free for folder, is_second in _group_folders(root) if (free := _group_bytes(folder, is_second)) is not None]
    if left:
        yield Limit("memory", min(left), "the limit of this container")


def allowed_processors(root: Path = Path("/")) -> int | None:
    """Whole processors that this process's control groups grant it the time of; None without a limit."""
    granted = [share for folder, is_second in _group_folders(root, "cpu") if (share := _group_cpu(folder, is_second))]
    return max(int(min(granted)), 1) if granted else None


def _group_cpu(folder: Path, is_second: bool) -> float | None:
    """Processors that a group may use; None without a limit."""
    names = ("cpu.max",) if is_second else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = " ".join((folder / name).read_text() for name in names).split()
        return int(quota) / int(period) if quota.isdigit() else None  # max, or -1
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _group_folders(root: Path, controller: str = "memory") -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of version 2) of each group of `controller` that this process is in.

    In a container the path that /proc names may not be visible: the container's own group is then mounted at the top.
    """
    mounted = root / "sys/fs/cgroup"
    for line in system_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        is_second = number == "0" and not controllers
        if not is_second and controller not in controllers.split(","):
            continue
        top = mounted if is_second else mounted / controller
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from ((top.joinpath(*parts[:depth]), is_second) for depth in range(len(parts) + 1))


def _group_bytes(folder: Path, is_second: bool) -> int | None:
    """Bytes left to a group, file caches counted as free; None without a limit."""
    limit_file, used_file = (
        ("memory.max", "memory.current") if is_second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    prefix = "" if is_second else "total_"
    try:
        limit = (folder / limit_file).read_text().strip()
        if not limit.isdigit() or int(limit) >= _NO_LIMIT:
            return None
        used = int((folder / used_file).read_text())
        kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    files = sum(int(kept.get(f"{prefix}{state}_file", 0)) for state in ("inactive", "active"))
    return max(int(limit) - used + files, 0)


def _of_resources(root: Path) -> Iterator[Limit]:
    if sys.platform == "win32":
        return
    import resource

    used = sizes(root / "proc/self/status")
    rows: tuple[tuple[Kind, int, str, str], ...] = (
        ("addresses", resource.RLIMIT_AS, "VmSize", "the limit of addresses (ulimit -v)"),
        ("data", resource.RLIMIT_DATA, "VmData", "the limit of data (ulimit -d)"),
    )
    for kind, number, field, name in rows:
        most = resource.getrlimit(number)[0]
        if most != resource.RLIM_INFINITY and field in used:
            yield Limit(kind, max(most - used[field], 0), name)


class MemoryWatch:
    """`limit_bytes`: most that the process's own memory may grow to; None: the user set none.

    `planned_bytes`: what the pair was planned to take of it; `why`: the last excess, after a number of bytes.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        used: Callable[[], int | None] = own_bytes,
        clock: Callable[[], float] = monotonic,
        planned_bytes: int = 0,
        free: Callable[[], int | None] = least_free,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.planned_bytes = planned_bytes
        self._used, self._clock, self._free = used, clock, free
        self._next_s = clock()
        self.why = ""
        self._others_before = self._others_bytes()
        PLANS.add(self)

    def _others_bytes(self) -> int:
        return sum(each.planned_bytes for each in list(PLANS) if each is not self)

    def close(self) -> None:
        """The pair was closed: its memory is free for others."""
        PLANS.discard(self)

    def left_bytes(self, used: int) -> int | None:
        """What the budget leaves where the process takes `used` bytes; None without a budget.

        The budget grows by what pairs that were loaded later were planned to take, less what closed ones were.
        """
        if self.limit_bytes is None:
            return None
        return self.limit_bytes + self._others_bytes() - self._others_before - used

    def excess(self) -> int:
        """Bytes over the limit, or too few that are free, now; 0 within both, and between two looks."""
        now_s = self._clock()
        if self not in PLANS or now_s < self._next_s:
            return 0
        self._next_s = now_s + _LOOK_EVERY_S
        return self.excess_now()

    def excess_now(self) -> int:
        """`excess` at any time, whenever the last look was."""
        free, used = self._free(), self._used()
        short = 0 if free is None else max(LEAST_FREE_BYTES - free, 0)
        over = 0 if used is None else -(self.left_bytes(used) or 0)
        self.why = "over the budget" if over >= short else "more must be free"
        return max(over, short)


# The pairs that are open.
PLANS: WeakSet[MemoryWatch] = WeakSet()


def spare_memory() -> int | None:
    """Bytes that may be taken without swapping, and within every budget. None where unknown."""
    free, used = free_memory(), own_bytes()
    if free is None or used is None:
        return free
    left = [most for pair in list(PLANS) if (most := pair.left_bytes(used)) is not None]
    return max(min([free, *left]), 0)

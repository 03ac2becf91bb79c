"""Checks before a load whether a model fits into the memory that this process may use.

An engine that runs out of memory often ends the process. The estimate is a lower bound, so that nothing is refused that
would have worked. Weights are mapped from their file: they count in full only against a limit of addresses
(`ulimit -v`), since the system can drop them from memory at any time.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import CapabilityError

_STACK_BYTES = 8 << 20
_ARENA_BYTES = 24 << 20  # of addresses that the allocator needs per thread
_CGROUPS = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a model needs: `mapped` from its files, `own` for caches and buffers; `threads` that work for it."""

    mapped: int
    own: int
    threads: int = 1

    @property
    def addresses(self) -> int:
        return self.mapped + self.own + (self.threads - 1) * (_STACK_BYTES + _ARENA_BYTES)


def check_room(name: str, need: Need, advice: str) -> None:
    """Raise CapabilityError, with the sizes needed and available, when `need` cannot be met."""
    wanted = {"addresses": need.addresses, "data": need.own, "memory": need.own}
    for kind, (free, limit) in _free().items():
        if wanted[kind] > free:
            raise CapabilityError(too_little(name, wanted[kind], free, limit, advice))


def too_little(name: str, wanted: int, free: int, limit: str, advice: str) -> str:
    return f"{name} needs about {_mib(wanted)} more memory, {_mib(max(free, 0))} are left under {limit}. {advice}"


def is_limited() -> bool:
    """Whether this process has a limit of addresses."""
    return "addresses" in _free()


def _free() -> dict[str, tuple[int, str]]:
    """Bytes left and what limits them, by kind; only the kinds that this system reports."""
    if sys.platform == "win32":
        return {}
    import resource

    found: dict[str, tuple[int, str]] = {}
    used = _fields("/proc/self/status")
    for kind, limit, field, name in (
        ("addresses", resource.RLIMIT_AS, "VmSize", "the limit of addresses (ulimit -v)"),
        ("data", resource.RLIMIT_DATA, "VmData", "the limit of data (ulimit -d)"),
    ):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and field in used:
            found[kind] = most - used[field], name
    available = _fields("/proc/meminfo")
    if "MemAvailable" in available:
        found["memory"] = available["MemAvailable"] + available.get("SwapFree", 0), "what the machine has free"
    group = _group_bytes()
    if group is not None and group < found.get("memory", (group + 1, ""))[0]:
        found["memory"] = group, "the limit of this container"
    return found


def _fields(path: str) -> dict[str, int]:
    """The sizes listed in a file of /proc, in bytes; none where there is no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines if line.endswith("kB"))
    return {name: int(size.split()[0]) << 10 for name, _, size in pairs}


def _group_bytes() -> int | None:
    """Bytes left to the control group of this process, file caches counted as free."""
    for folder, most, used, dropped in (
        (_CGROUPS[1], "memory.max", "memory.current", "inactive_file"),
        (_CGROUPS[0], "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = Path(folder, most).read_text().strip()
            kept = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            if limit.isdigit() and int(limit) < 1 << 62:
                return int(limit) - int(Path(folder, used).read_text()) + int(kept.get(dropped, 0))
        except (OSError, ValueError):
            continue
    return None


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 1 << 30 else f"{size / 2**30:.1f} GiB"

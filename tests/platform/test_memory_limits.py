"""What is left to this process, read from a fake root folder; and from the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.platform.memory import Limit, allowed_processors, free_memory, limits, own_bytes

MIB = 1 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and control groups")


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def memory_limits(root: Path) -> dict[str, Limit]:
    return {each.name: each for each in limits(root) if each.kind == "memory"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(
        tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4096 kB\nSwapFree: 1024 kB\nHugePages_Free: 0"}
    )
    return tmp_path


def test_the_machine_counts_swap_as_slow(root: Path) -> None:
    (machine,) = memory_limits(root).values()
    assert (machine.free_bytes, machine.swap_bytes) == (5 * MIB, MIB)
    assert free_memory(root) == 4 * MIB


def second(limit: object, used: int, files: int = 0) -> dict[str, object]:
    return {
        "memory.max": limit,
        "memory.current": used,
        "memory.stat": f"anon {used - files}\ninactive_file {files // 2}\nactive_file {files - files // 2}",
    }


def test_a_group_of_version_2_frees_its_file_caches(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/app.slice/own"})
    write(root / "sys/fs/cgroup/app.slice/own", second(10 * MIB, 8 * MIB, files=1 * MIB))
    write(root / "sys/fs/cgroup/app.slice", second("max", 50 * MIB))
    assert memory_limits(root)["the limit of this container"].free_bytes == 3 * MIB
    assert free_memory(root) == 3 * MIB
    write(root / "sys/fs/cgroup/app.slice", second(20 * MIB, 18 * MIB))
    assert free_memory(root) == 2 * MIB, "the tightest group above counts"


def test_a_group_of_version_1(root: Path) -> None:
    write(root, {"proc/self/cgroup": "9:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/"})
    first = {
        "memory.limit_in_bytes": 6 * MIB,
        "memory.usage_in_bytes": 5 * MIB,
        "memory.stat": f"cache 7\ntotal_inactive_file {MIB}\ntotal_active_file 0",
    }
    write(root / "sys/fs/cgroup/memory/docker/abc", first)
    write(root / "sys/fs/cgroup/memory", {**first, "memory.limit_in_bytes": 9223372036854771712})
    assert free_memory(root) == 2 * MIB


def test_a_container_sees_its_own_group_at_the_top(root: Path) -> None:
    """The path that /proc names lies outside the container."""
    write(root, {"proc/self/cgroup": "0::/../../host/abc"})
    write(root / "sys/fs/cgroup", second(3 * MIB, 4 * MIB))
    assert free_memory(root) == 0


def test_the_tightest_share_of_processors_counts(root: Path) -> None:
    assert allowed_processors(root) is None
    write(root, {"proc/self/cgroup": "0::/app.slice/own"})
    write(root / "sys/fs/cgroup/app.slice/own", {"cpu.max": "max 100000"})
    assert allowed_processors(root) is None
    write(root / "sys/fs/cgroup/app.slice", {"cpu.max": "250000 100000"})
    assert allowed_processors(root) == 2
    write(root / "sys/fs/cgroup/app.slice/own", {"cpu.max": "50000 100000"})
    assert allowed_processors(root) == 1  # one thread, though it may run half of the time only
    write(root, {"proc/self/cgroup": "9:cpu,cpuacct:/docker/abc\n4:memory:/\n0::/"})  # version 1
    write(root / "sys/fs/cgroup/cpu/docker/abc", {"cpu.cfs_quota_us": 300000, "cpu.cfs_period_us": 100000})
    write(root / "sys/fs/cgroup/cpu", {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000})
    assert allowed_processors(root) == 3


@pytest.mark.parametrize("damage", ["memory.max", "memory.current", "memory.stat"])
def test_files_that_make_no_sense_limit_nothing(root: Path, damage: str) -> None:
    write(root, {"proc/self/cgroup": "0::/own"})
    write(root / "sys/fs/cgroup/own", {**second(3 * MIB, 2 * MIB), damage: "a b c"})
    assert free_memory(root) == 4 * MIB


def test_nothing_is_known_without_proc(tmp_path: Path) -> None:
    assert not any(each.name == "the limit of this container" for each in limits(tmp_path))


@pytest.mark.quiet
def test_this_process() -> None:
    own = own_bytes()
    assert own is not None and MIB < own < 1 << 40
    held = bytearray(os.urandom(1 << 20) * 64)
    assert (own_bytes() or 0) - own > len(held) // 2
    assert (free_memory() or 0) > MIB


def test_the_peak_is_this_programs_and_not_that_of_the_one_that_started_it() -> None:
    code = "from edgespec.platform.machine import peak_rss_bytes; print(peak_rss_bytes())"
    held = bytearray(os.urandom(1 << 20) * 256)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert MIB < int(done.stdout) < len(held)


@pytest.mark.quiet
def test_a_closed_model_leaves_no_memory_with_the_allocator() -> None:
    code = """
import edgespec
from edgespec.platform.memory import own_bytes, return_freed_memory

with edgespec.load("demo", engine="onnx", threads=1, context_length=2048) as model:
    model.generate("a bus " * 500, options=edgespec.GenerateOptions(max_tokens=1))
kept = own_bytes()
return_freed_memory()
print(kept - own_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * MIB

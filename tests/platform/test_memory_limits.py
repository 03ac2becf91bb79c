"""What is left to this process and which cores it has, read from fake root folders; and from the real one."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.platform import machine
from edgespec.platform.memory import Limit, allowed_processors, free_memory, limits

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


# -- which cores of a processor with two kinds threads are counted for, and what a processor is called


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up /sys, in which every file is absent that a test does not write_cpu."""
    monkeypatch.setattr(machine, "CPUS", tmp_path)
    monkeypatch.setattr(machine, "INTEL_FAST", tmp_path / "cpu_core")
    monkeypatch.setattr(machine, "allowed_processors", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def write_cpu(system: Path, cpu: int, name: str, text: str) -> None:
    path = system / f"cpu{cpu}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def run_on(monkeypatch: pytest.MonkeyPatch, processors: set[int]) -> tuple[int, int]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: processors, raising=False)
    return machine.default_threads(), machine.physical_cores()


def test_intels_efficiency_cores_are_left_out(system: Path, monkeypatch: pytest.MonkeyPatch):
    (system / "cpu_core").write_text("0-3\n")  # two cores of two threads, and four efficiency cores
    for cpu in range(8):
        write_cpu(system, cpu, "topology/thread_siblings_list", f"{cpu & ~1}-{cpu | 1}" if cpu < 4 else str(cpu))
    assert run_on(monkeypatch, set(range(8))) == (2, 6)
    assert run_on(monkeypatch, {0, 4, 5}) == (1, 3)
    assert run_on(monkeypatch, {4, 5, 6}) == (3, 3)  # bound to slow cores only


@pytest.mark.parametrize(
    ("capacities", "fast"),
    [
        ([400, 400, 400, 400, 1024, 1024, 1024, 1024], 4),  # four A55 beside four A76
        ([1024, 780, 780, 780, 300, 300, 300, 300], 4),  # one fastest core, three nearly as fast
        ([1024] * 4, 4),
    ],
)
def test_arms_little_cores_are_left_out(system: Path, monkeypatch: pytest.MonkeyPatch, capacities, fast):
    for cpu, capacity in enumerate(capacities):
        write_cpu(system, cpu, "cpu_capacity", f"{capacity}\n")
    assert run_on(monkeypatch, set(range(len(capacities)))) == (fast, len(capacities))


def test_without_anything_from_the_kernel_all_cores_count(system: Path, monkeypatch: pytest.MonkeyPatch):
    assert run_on(monkeypatch, {0, 1, 5}) == (3, 3)


def test_fewer_where_a_control_group_allows_fewer(system: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "allowed_processors", lambda: 2)
    assert run_on(monkeypatch, set(range(8))) == (2, 2)


def record(efficiency_class: int, size: int = 48) -> bytes:
    return struct.pack("<IIBB", 0, size, 1, efficiency_class).ljust(size, b"\0")


def test_windows_tells_classes_of_cores():
    records = b"".join(record(each) for each in (1, 1, 0, 0, 0))
    assert machine.above_lowest(records) == 2
    assert machine.above_lowest(record(0) * 4) is machine.above_lowest(b"") is None


# -- the name that measurements of a processor are kept under

ARM = "processor\t: {}\nFeatures\t: fp asimd {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n\n"


def name_of(monkeypatch: pytest.MonkeyPatch, path: Path, text: str) -> str:
    path.write_text(text)
    monkeypatch.setattr(machine, "_CPUINFO", path)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "platform", "linux")
    machine.processor.cache_clear()
    try:
        return machine.processor()
    finally:
        machine.processor.cache_clear()


def test_arm_processors_with_other_kernels_have_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = [
        ARM.format(0, "", "0xd08"),
        ARM.format(0, "asimddp", "0xd0c"),
        ARM.format(0, "asimddp i8mm", "0xd0c"),
        ARM.format(0, "asimddp", "0xd0b") + ARM.format(1, "asimddp", "0xd05"),
    ]
    names = [name_of(monkeypatch, tmp_path / "cpuinfo", text) for text in texts]
    assert len(set(names)) == len(texts) and all(name.startswith("aarch64 0x41 0xd0") for name in names)


def test_old_arm_processors_lack_dot_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", path)
    old, new, x86 = ARM.format(0, "", "0xd08"), ARM.format(0, "asimddp", "0xd0c"), "flags : avx2\n"
    for text, lacks in ((old, True), (new, False), (new + old, True), (x86, False), (None, False)):
        path.write_text(text) if text is not None else path.unlink()
        machine.lacks_dot_products.cache_clear()
        assert machine.lacks_dot_products() is lacks
    machine.lacks_dot_products.cache_clear()


def test_a_processor_with_a_name_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert name_of(monkeypatch, tmp_path / "cpuinfo", "processor : 0\nmodel name\t: A CPU\nflags : x\n") == "A CPU"

"""Which cores of a processor with two kinds threads are counted for, and what a processor is called."""

from __future__ import annotations

import os
import platform
import struct
import sys
from pathlib import Path

import pytest

from edgespec.platform import machine


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up /sys, in which every file is absent that a test does not write."""
    monkeypatch.setattr(machine, "CPUS", tmp_path)
    monkeypatch.setattr(machine, "INTEL_FAST", tmp_path / "cpu_core")
    monkeypatch.setattr(machine, "allowed_processors", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def write(system: Path, cpu: int, name: str, text: str) -> None:
    path = system / f"cpu{cpu}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def run_on(monkeypatch: pytest.MonkeyPatch, processors: set[int]) -> tuple[int, int]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: processors, raising=False)
    return machine.default_threads(), machine.physical_cores()


def test_intels_efficiency_cores_are_left_out(system: Path, monkeypatch: pytest.MonkeyPatch):
    (system / "cpu_core").write_text("0-3\n")  # two cores of two threads, and four efficiency cores
    for cpu in range(8):
        write(system, cpu, "topology/thread_siblings_list", f"{cpu & ~1}-{cpu | 1}" if cpu < 4 else str(cpu))
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
        write(system, cpu, "cpu_capacity", f"{capacity}\n")
    assert run_on(monkeypatch, set(range(len(capacities)))) == (fast, len(capacities))


def test_without_anything_from_the_kernel_all_cores_count(system: Path, monkeypatch: pytest.MonkeyPatch):
    assert run_on(monkeypatch, {0, 1, 5}) == (3, 3)
    (system / "cpu_core").write_text("nonsense")
    assert run_on(monkeypatch, {0, 1, 5}) == (3, 3)


def test_fewer_where_a_control_group_allows_fewer(system: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "allowed_processors", lambda: 2)
    assert run_on(monkeypatch, set(range(8))) == (2, 2)


def record(efficiency_class: int, size: int = 48) -> bytes:
    return struct.pack("<IIBB", 0, size, 1, efficiency_class).ljust(size, b"\0")


def test_windows_tells_classes_of_cores():
    records = b"".join(record(each) for each in (1, 1, 0, 0, 0))
    assert list(machine.efficiency_classes(records)) == [1, 1, 0, 0, 0]
    assert machine.above_lowest(machine.efficiency_classes(records)) == 2
    assert machine.above_lowest(machine.efficiency_classes(record(0) * 4)) is None
    assert machine.above_lowest([]) is None
    assert list(machine.efficiency_classes(records + record(1)[:5])) == [1, 1, 0, 0, 0]  # cut off
    assert list(machine.efficiency_classes(record(1, 48)[:4] + bytes(44))) == []  # a size of nothing ends it


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

"""Fast and slow cores of one processor: Intel's performance and efficiency cores, ARM's big.LITTLE, Apple's.

Threads of a pass wait for one another at every layer, so one on a slow core holds up all of them. llama.cpp's own
programs leave Intel's efficiency cores out for the same reason. Only slow cores are left out: a processor whose cores
differ little, such as AMD's with dense ones, counts as uniform.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

CPUS, INTEL_FAST = Path("/sys/devices/system/cpu"), Path("/sys/devices/cpu_core/cpus")
SLOW = 0.5  # of the fastest core's capacity: an A55 beside an A76 has .4, an A78 beside an X1 has .75
_CORE_RELATIONSHIP = 0  # RelationProcessorCore
_HEADER = struct.Struct("<IIBB")  # of SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX: kind, bytes, flags, efficiency class


def linux_fast(processors: Iterable[int]) -> set[int]:
    """Those of the logical processors whose core is not a slow one; all of them where the kernel tells nothing."""
    given = set(processors)
    fast = given & _listed(INTEL_FAST)  # the file is there on hybrid processors only
    if fast:
        return fast
    capacities = {cpu: _capacity(cpu) for cpu in given}
    most = max(capacities.values(), default=0)
    return {cpu for cpu, capacity in capacities.items() if capacity >= SLOW * most}


def _listed(path: Path) -> set[int]:
    """The numbers of a list as the kernel writes it, such as 0-3,8; empty where there is no such file."""
    try:
        parts = path.read_text().strip().split(",")
        ends = [part.partition("-") for part in parts if part]
        return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()


def _capacity(cpu: int) -> int:
    """What the kernel of an ARM processor says of a core's speed, 1024 for the fastest; 0 on others."""
    try:
        return int((CPUS / f"cpu{cpu}" / "cpu_capacity").read_text())
    except (OSError, ValueError):
        return 0


def apple_fast() -> int | None:
    """Number of performance cores; None where there is one kind only."""
    value, size = ctypes.c_int32(0), ctypes.c_size_t(4)
    failed = ctypes.CDLL(None).sysctlbyname(
        b"hw.perflevel0.physicalcpu", ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return None if failed or value.value < 1 else value.value


def windows_fast() -> int | None:
    """Number of physical cores above the lowest efficiency class; None where there is one class only, or on failure."""
    ask = ctypes.windll.kernel32.GetLogicalProcessorInformationEx  # type: ignore[attr-defined, unused-ignore]
    needed = ctypes.c_uint32(0)
    ask(_CORE_RELATIONSHIP, None, ctypes.byref(needed))
    found = ctypes.create_string_buffer(max(needed.value, 1))
    if not ask(_CORE_RELATIONSHIP, found, ctypes.byref(needed)):
        return None
    return above_lowest(efficiency_classes(found.raw[: needed.value]))


def efficiency_classes(records: bytes) -> Iterator[int]:
    """The class of each core, from records of GetLogicalProcessorInformationEx. A higher one is faster."""
    offset = 0
    while offset + _HEADER.size <= len(records):
        _, size, _, efficiency_class = _HEADER.unpack_from(records, offset)
        if size < _HEADER.size:
            return
        yield efficiency_class
        offset += size


def above_lowest(classes: Iterable[int]) -> int | None:
    """How many are above the lowest; None where all are equal. A phone's fastest core alone would be too few."""
    found = list(classes)
    return sum(each > min(found) for each in found) or None

"""The machine that this process runs on: its processor, the cores and threads to use, and the memory used so far.

Threads of a pass wait for one another at every layer, so one on a slow core holds up all of them: Intel's efficiency
cores and the small cores of ARM processors are left out. A processor whose cores differ little counts as uniform.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import CapabilityError
from edgespec.platform.memory import allowed_processors, sizes, system_text

Returned = TypeVar("Returned")
CPUS, INTEL_FAST = Path("/sys/devices/system/cpu"), Path("/sys/devices/cpu_core/cpus")
_CPUINFO, _STATUS = Path("/proc/cpuinfo"), Path("/proc/self/status")
_ARM_FIELDS = ("CPU implementer", "CPU part", "Features")
SLOW = 0.5  # of the fastest core's capacity: an A55 beside an A76 has .4, an A78 beside an X1 has .75
_CORE_RELATIONSHIP = 0  # RelationProcessorCore
_HEADER = struct.Struct("<IIBB")  # of SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX: kind, bytes, flags, efficiency class


@cache
def processor() -> str:
    """The CPU's model as the system spells it; of one that Linux gives no name, its maker, part and instructions.

    Measurements are kept under it: processors with other kernels must not share a name.
    """
    if sys.platform == "darwin":  # platform.processor() is "arm" for all of Apple's
        name = ctypes.create_string_buffer(256)
        _sysctl(b"machdep.cpu.brand_string", name)
        return name.value.decode(errors="replace").strip() or platform.machine()
    found = {name: [*dict.fromkeys(values)] for name, values in _cpuinfo().items()}  # cores may be of several kinds
    if "model name" in found:
        return found["model name"][0]
    if "CPU part" in found:
        parts = [platform.machine(), *(" ".join(found.get(name, ())) for name in _ARM_FIELDS)]
        return " ".join(filter(None, parts))
    return platform.processor() or platform.machine()


def _cpuinfo() -> dict[str, list[str]]:
    """What Linux tells of the processor, one value for each logical one; empty elsewhere."""
    found: dict[str, list[str]] = {}
    for name, colon, value in (line.partition(":") for line in system_text(_CPUINFO).splitlines()):
        if colon:
            found.setdefault(name.strip(), []).append(value.strip())
    return found


def _sysctl(name: bytes, value: Any) -> bool:
    """Read what macOS tells under a name into `value`, a buffer or a number; whether it does."""
    size = ctypes.c_size_t(ctypes.sizeof(value))
    read = ctypes.CDLL(None).sysctlbyname
    return bool(read(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)) == 0)


def usable_processors() -> int:
    """Logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


@cache
def instruction_sets() -> frozenset[str]:
    """What the CPU offers beyond plain x86-64, as Linux names it; empty on other processors.

    Elsewhere than on Linux an x86 processor is taken for one with AVX2, as nearly all in use are.
    """
    if not is_x86():
        return frozenset()
    flags = _cpuinfo().get("flags")
    return frozenset(flags[0].split() if flags else {"avx2"})


@cache
def lacks_dot_products() -> bool:
    """Whether an ARM processor is too old for sums of products of bytes, for which llama.cpp reorders weights there."""
    features = _cpuinfo().get("Features", ())
    return not all("asimddp" in each.split() for each in features)


def default_threads() -> int:
    """Threads for a compute-bound library: one on each fast core that this process may run on, at least 1.

    Two threads on one core compete for its vector units, and more threads than cores slow llama.cpp down tenfold.
    """
    if sys.platform == "linux":
        return _allowed_cores(linux_fast(os.sched_getaffinity(0)))
    asked = {"darwin": apple_fast, "win32": windows_fast}.get(sys.platform)
    return (asked and asked()) or physical_cores()


def physical_cores() -> int:
    """Cores that this process may run on, slow ones too, at least 1."""
    if sys.platform == "linux":
        return _allowed_cores(os.sched_getaffinity(0))
    import psutil  # Linux does without

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _allowed_cores(processors: Iterable[int]) -> int:
    cores = {_siblings(cpu) for cpu in processors}
    return max(min(len(cores), allowed_processors() or len(cores)), 1)


def _siblings(cpu: int) -> str:
    """The hardware threads of one core, as the kernel lists them; the cpu itself where it does not."""
    return system_text(CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").strip() or str(cpu)


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
    parts = system_text(path).strip().split(",")
    ends = [part.partition("-") for part in parts if part]
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


def _capacity(cpu: int) -> int:
    """What the kernel of an ARM processor says of a core's speed, 1024 for the fastest; 0 on others."""
    return int(system_text(CPUS / f"cpu{cpu}" / "cpu_capacity") or 0)


def apple_fast() -> int | None:
    """Number of performance cores; None where there is one kind only."""
    value = ctypes.c_int32(0)
    return value.value if _sysctl(b"hw.perflevel0.physicalcpu", value) and value.value > 0 else None


def windows_fast() -> int | None:
    """Number of physical cores above the lowest efficiency class; None where there is one class only, or on failure."""
    ask = ctypes.windll.kernel32.GetLogicalProcessorInformationEx  # type: ignore[attr-defined, unused-ignore]
    needed = ctypes.c_uint32(0)
    ask(_CORE_RELATIONSHIP, None, ctypes.byref(needed))
    found = ctypes.create_string_buffer(max(needed.value, 1))
    if not ask(_CORE_RELATIONSHIP, found, ctypes.byref(needed)):
        return None
    return above_lowest(found.raw[: needed.value])


def above_lowest(records: bytes) -> int | None:
    """How many cores are of a faster class than the lowest, by records of GetLogicalProcessorInformationEx.

    None where all are of one class. A phone's fastest core alone would be too few.
    """
    classes, offset = list[int](), 0
    while offset < len(records):
        _, size, _, efficiency_class = _HEADER.unpack_from(records, offset)
        classes.append(efficiency_class)
        offset += size
    return sum(each > min(classes) for each in classes) or None


def reset_peak() -> None:
    """Let `peak_rss_bytes` tell of what comes from now on, where the system can (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """The largest resident set this process has had, in bytes."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    if peak := sizes(_STATUS).get("VmHWM"):  # getrusage counts what the program that started this one had, too
        return peak
    import resource  # not there on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


_starting_thread = threading.Lock()  # the size of a stack is a setting of the process


def on_stack(num_bytes: int, function: Callable[[], Returned]) -> Returned:
    """`function()` in a thread with so much stack. Raises what it raises, and CapabilityError without memory for it."""
    pool = ThreadPoolExecutor(1, "edgespec-stack")
    with _starting_thread:
        before = threading.stack_size(num_bytes)
        try:
            result = pool.submit(function)
        except RuntimeError as exc:
            raise CapabilityError(f"a stack of {num_bytes >> 20} MiB is needed, for which no memory is left") from exc
        finally:
            threading.stack_size(before)
    pool.shutdown(wait=False)  # an interrupt does not wait for it
    return result.result()

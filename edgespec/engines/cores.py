"""How many threads a compute-bound library should use: physical cores this process may run on.

Two threads on one core fight over its vector units, and more threads than cores cost llama.cpp ten times and more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def physical_cores() -> int:
    """Physical cores in this process's affinity mask, at most the container's quota; at least 1."""
    if sys.platform == "darwin":
        return _performance_cores() or os.cpu_count() or 1
    if sys.platform != "linux":
        # Hyper-threading cannot be read portably; half the logical processors is right on most x86 machines.
        return max((os.cpu_count() or 2) // 2, 1)
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in allowed}
    return max(min(len(cores), _quota() or len(cores)), 1)


def _siblings(cpu: int) -> str:
    """The hardware threads of one core, as the kernel spells them; the cpu itself where it does not say."""
    try:
        return (CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int | None:
    """Whole processors that the control group grants, or None without a limit."""
    try:
        granted, period = QUOTA.read_text().split()
        return None if granted == "max" else max(int(granted) // int(period), 1)
    except (OSError, ValueError):
        return None


def _performance_cores() -> int | None:
    """Apple's performance cores: the efficient ones would hold every barrier up."""
    import ctypes

    value, size = ctypes.c_int32(0), ctypes.c_size_t(4)
    failed = ctypes.CDLL(None).sysctlbyname(
        b"hw.perflevel0.physicalcpu", ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return None if failed or value.value < 1 else value.value

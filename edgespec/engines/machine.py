"""Which machine this is: what tells one from another where a home folder is shared."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def processor() -> str:
    """The processor's model as the system spells it."""
    try:
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_processors() -> int:
    """Logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_name() -> str:
    """Processor and how much of it is ours: with another number of processors other settings are best."""
    return f"{processor()}, {usable_processors()} processors"

"""What this process uses of the machine's memory."""

from __future__ import annotations

import ctypes
import sys


def peak_rss_bytes() -> int:
    """The largest resident set this process has had, in bytes."""
    if sys.platform == "win32":
        return _windows_peak_bytes()
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _ProcessMemoryCounters(ctypes.Structure):
    _fields_ = [
        ("cb", ctypes.c_uint32),
        ("page_fault_count", ctypes.c_uint32),
        ("peak_working_set_size", ctypes.c_size_t),
        *((f"unused_{index}", ctypes.c_size_t) for index in range(7)),
    ]


def _windows_peak_bytes() -> int:
    counters = _ProcessMemoryCounters(cb=ctypes.sizeof(_ProcessMemoryCounters))
    library = ctypes.CDLL("psapi")
    handle = ctypes.c_void_p(-1)  # the pseudo handle of the calling process
    library.GetProcessMemoryInfo(handle, ctypes.byref(counters), counters.cb)
    return int(counters.peak_working_set_size)

"""What slows this machine down at present: pages read from the disk, heat, a limited clock, a battery, other programs.

Everything is read from /proc and /sys, so most of it is known only on Linux; what is unknown is None or False. This
module knows no engine and no model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROCESSORS, _SUPPLIES = "sys/devices/system/cpu", "sys/class/power_supply"
_SAVING_PROFILES = ("low-power", "quiet", "power")
_MOST_PROCESSORS = 64  # most whose counters are read; neighbours are throttled together


@dataclass(frozen=True, slots=True)
class Conditions:
    """The machine at one moment.

    `disk_reads`: times until now that this process waited for pages, from a file or from swap; `stalled`: share of the
    last ten seconds in which some program waited for memory, 0 to 1; `throttled`: times until now that the CPU
    was slowed down by heat; `clock`: share of its full clock that it may use; `on_battery`: without mains;
    `saves_power`: the system's power profile favours a low consumption; `load`: mean number of programs that ran or
    waited to run in the last minute.
    """

    disk_reads: int | None = None
    stalled: float | None = None
    throttled: int | None = None
    clock: float | None = None
    on_battery: bool = False
    saves_power: bool = False
    load: float | None = None

    @classmethod
    def now(cls, root: Path = Path("/")) -> Conditions:
        """The present conditions; `root`: where /proc and /sys are found."""
        return cls(
            _disk_reads(root),
            _stalled(root),
            _throttled(root),
            _clock(root),
            _on_battery(root),
            _word(root / "sys/firmware/acpi/platform_profile") in _SAVING_PROFILES,
            _load(root),
        )


def _disk_reads(root: Path) -> int | None:
    """Major page faults of this process."""
    stat = _word(root / "proc/self/stat")
    fields = stat.rpartition(")")[2].split()  # the program's name may hold spaces
    if len(fields) > 9 and fields[9].isdigit():
        return int(fields[9])
    if sys.platform in ("linux", "win32"):
        return None
    import resource  # not there on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _stalled(root: Path) -> float | None:
    """https://docs.kernel.org/accounting/psi.html"""
    for line in _word(root / "proc/pressure/memory").splitlines():
        if line.startswith("some avg10="):
            return _number(line.split()[1].partition("=")[2], 100.0)
    return None


def _throttled(root: Path) -> int | None:
    """Throttling events of Intel processors: the largest count per package, whose cores count the same events."""
    counts = [
        int(word)
        for folder in _folders(root / _PROCESSORS, "cpu[0-9]*")
        for name in ("package_throttle_count", "core_throttle_count")
        if (word := _word(folder / "thermal_throttle" / name)).isdigit()
    ]
    return max(counts, default=None)


def _clock(root: Path) -> float | None:
    """The largest share of its full clock that any group of processors may use."""
    shares = []
    for policy in _folders(root / _PROCESSORS / "cpufreq", "policy*"):
        allowed, full = _word(policy / "scaling_max_freq"), _word(policy / "cpuinfo_max_freq")
        if allowed.isdigit() and full.isdigit() and int(full):
            shares.append(int(allowed) / int(full))
    return max(shares, default=None)


def _on_battery(root: Path) -> bool:
    """Whether a battery is being emptied and no mains is connected."""
    kinds = [(_word(folder / "type"), folder) for folder in _folders(root / _SUPPLIES, "*")]
    connected = any(_word(folder / "online") == "1" for kind, folder in kinds if kind in ("Mains", "USB"))
    # Mice and headsets have batteries, too; those of the machine have no scope or "System".
    own = (folder for kind, folder in kinds if kind == "Battery" and _word(folder / "scope") != "Device")
    return not connected and any(_word(folder / "status") == "Discharging" for folder in own)


def _load(root: Path) -> float | None:
    words = _word(root / "proc/loadavg").split()
    return _number(words[0], 1.0) if words else None


def _number(word: str, unit: float) -> float | None:
    try:
        return float(word) / unit
    except ValueError:
        return None


def _folders(root: Path, pattern: str) -> Iterator[Path]:
    try:
        yield from sorted(root.glob(pattern))[:_MOST_PROCESSORS]
    except OSError:
        return


def _word(path: Path) -> str:
    """The text of a small file; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""

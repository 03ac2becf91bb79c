"""Energy counters of the processor (RAPL, Linux powercap). If they cannot be read, energy is unknown (None).

The counters are per processor package and include everything that runs on the machine. Source: the kernel's
Documentation/power/powercap.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class _Counter:
    path: Path
    range_uj: int

    @property
    def value_uj(self) -> int:
        return int((self.path / "energy_uj").read_text())


class EnergyMeter:
    """The package counters below `root`; none if any of them cannot be read."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._counters: tuple[_Counter, ...] = ()
        try:
            self._counters = tuple(_counters(root))
        except (OSError, ValueError):  # usually readable by root only
            return

    @property
    def is_known(self) -> bool:
        return bool(self._counters)

    def read(self) -> tuple[int, ...] | None:
        """The counters in microjoules; None if there are none."""
        try:
            return tuple(counter.value_uj for counter in self._counters) or None
        except (OSError, ValueError):
            return None

    def joules_since(self, before: tuple[int, ...] | None) -> float | None:
        """Joules since `before` was read, with up to one overflow per counter; None if unknown."""
        now = self.read()
        if before is None or now is None:
            return None
        used_uj = 0
        for counter, start, end in zip(self._counters, before, now, strict=True):
            used_uj += end - start if end >= start else end + counter.range_uj - start
        return used_uj / 1e6


def _counters(root: Path) -> list[_Counter]:
    counters = []
    for folder in sorted(root.glob("*-rapl:*")):
        # subdomains (`intel-rapl:0:1`) are included in their package's counter
        if folder.name.count(":") != 1 or not (folder / "name").read_text().startswith("package"):
            continue
        counter = _Counter(folder, int((folder / "max_energy_range_uj").read_text()))
        if counter.value_uj >= 0:
            counters.append(counter)
    return counters

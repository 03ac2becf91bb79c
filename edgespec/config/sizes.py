"""Byte sizes as people write and read them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgespec.errors import ConfigError, shown

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}{rest}": 1000**power for power, letter in enumerate("kmgt", 1) for rest in ("b",)}
_UNITS |= {f"{letter}{rest}": 1024**power for power, letter in enumerate("kmgt", 1) for rest in ("", "ib")}
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([a-z]*|%)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How much memory a loaded pair may take: `num_bytes`, or `share` of what the machine has free."""

    num_bytes: int | None = None
    share: float = 1.0

    def of(self, free_bytes: int | None) -> int | None:
        """In bytes, where `free_bytes` are free; None where neither is known."""
        if self.num_bytes is not None:
            return self.num_bytes
        return None if free_bytes is None else int(self.share * free_bytes)


def parse_budget(given: object) -> MemoryBudget:
    """`auto` (all that is free), a share such as 80%, a size such as 6GiB, 6G, 1.5GB or 512MB, or whole bytes.

    G and GiB are 1024^3 bytes, GB is 1000^3. Raises ConfigError.
    """
    allowed = "allowed: auto, a share of the free memory such as 80%, or a size such as 6GiB, 6G or 512MB"
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise ConfigError(f"memory must be at least 1 byte, got {shown(given)}; {allowed}")
        return MemoryBudget(given)
    if isinstance(given, str) and given.strip().lower() == "auto":
        return MemoryBudget()
    found = _SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None:
        raise ConfigError(f"memory {shown(given)} is not a size; {allowed}")
    number, unit = float(found[1]), found[2].lower()
    if unit == "%":
        if not 0 < number <= 100:
            raise ConfigError(f"memory {shown(given)} is not a share from 1% to 100%; {allowed}")
        return MemoryBudget(share=number / 100)
    if unit not in _UNITS or number * _UNITS[unit] < 1:
        raise ConfigError(f"memory {shown(given)} is not a size; {allowed}")
    return MemoryBudget(int(number * _UNITS[unit]))


def as_size(num_bytes: float) -> str:
    """A size for people: GiB from 1 GiB on, MiB below, KiB or bytes where it would be no MiB."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / 2**30:.2f} GiB"
    if num_bytes >= 1 << 19:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB" if num_bytes >= 1 << 10 else f"{num_bytes:.0f} bytes"

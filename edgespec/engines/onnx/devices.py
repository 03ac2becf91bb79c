"""Finds by trial what a device other than the CPU computes correctly: when it is wrong, it reports no error.

Seen with ONNX Runtime's WebGPU (plugin 0.4.0, on a software device): passes of 32 rows and more gave wrong logits, and
attention took the index of a token's cell for its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgespec.engines.onnx.library import device_identity, version
from edgespec.engines.onnx.passes import Passes, PassRows
from edgespec.errors import CapabilityError
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.types import NO_PARENT, Logits, TokenIds

METHOD = 1  # increase it when more is tried
NARROW = 8  # rows of the passes that wider ones are compared with
GAP = 3  # cells that no token sees
TOLERANCE = 0.02  # in standard deviations of the logits
WIDTHS = (16, 31, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """`widest`: most rows of a pass; `keeps_positions`: whether a token's cell may differ from its position."""

    widest: int
    keeps_positions: bool

    def notes(self, provider: str, asked: int) -> tuple[str, ...]:
        """What the user should know."""
        found = []
        if self.widest < asked:
            found.append(
                f"{provider} gives wrong results for more than {self.widest} rows at once here: prompts take longer"
            )
        if not self.keeps_positions:
            found.append(f"the attention of {provider} ignores positions: no trees, and one answer at a time")
        return tuple(found)


def device_limits(
    passes: Passes, files: Sequence[Path], provider: str, vocabulary: int, rows: int, exit_layer: int | None = None
) -> DeviceLimits:
    """Tried once per model, device and version. Uses cache 0, and passes of at most `rows` rows.

    `exit_layer`: the layer after which the graph is cut, since a part of a graph is tried separately. Passes that only
    ever append to a text are not tried with gaps. Raises CapabilityError where not even narrow passes agree.
    """
    if passes.capacity < 4 * NARROW:  # too small a context to try anything in
        return DeviceLimits(min(rows, NARROW), keeps_positions=False)
    measured = (provider, version(), device_identity(provider), rows, type(passes).__name__, exit_layer)
    key = key_of("device", METHOD, measured, *map(file_key, files))
    known: DeviceLimits | None = disk_cache.get("devices", key, DeviceLimits)
    if known is None or known.widest < 1:
        known = _Trial(passes, vocabulary, rows).limits()
        disk_cache.put("devices", key, known)
    return known


class _Trial:
    def __init__(self, passes: Passes, vocabulary: int, rows: int) -> None:
        self._passes = passes
        self._ids = np.random.default_rng(0).integers(0, vocabulary, max(rows, 4 * NARROW)).astype(np.int32)
        self._rows = rows

    def limits(self) -> DeviceLimits:
        halves = self._narrow(0, 2 * NARROW)
        if not _agree(self._one_by_one(2 * NARROW), halves):
            raise CapabilityError(
                "this device gives wrong results for this model: use --provider cpu, or another export"
            )
        sound = NARROW
        for width in sorted({width for width in (*WIDTHS, self._rows) if NARROW < width <= self._rows}):
            wanted = self._narrow(sound - sound % NARROW, width)  # cells before that are right
            if not _agree(self._last(0, self._ids[:width]), wanted):
                break  # no wider one is worth a try
            sound = width
        return DeviceLimits(min(sound, self._rows), self._has_positions(halves))

    def _narrow(self, start: int, end: int) -> Logits:
        """Logits of the last token before `end`, by narrow passes from `start` on."""
        parts = [(base, self._ids[base : min(base + NARROW, end)]) for base in range(start, end, NARROW)]
        return [self._last(base, part) for base, part in parts][-1]

    def _last(self, base: int, ids: TokenIds) -> Logits:
        scored: Logits = self._passes.run(0, PassRows(base, ids, np.array([ids.size - 1])))[0].copy()
        return scored

    def _one_by_one(self, count: int) -> Logits:
        return [self._last(at, self._ids[at : at + 1]) for at in range(count)][-1]

    def _has_positions(self, wanted: Logits) -> bool:
        """Whether the second half of a text scores the same after cells that are masked; True if that never happens."""
        if not self._passes.takes_gaps:
            return True
        self._last(0, self._ids[: NARROW + GAP])
        ids, positions = self._ids[NARROW : 2 * NARROW], np.arange(NARROW, 2 * NARROW, dtype=np.int32)
        parents, sees = [NO_PARENT, *range(NARROW - 1)], [np.arange(NARROW)] * NARROW
        rows = PassRows(NARROW + GAP, ids, np.array([NARROW - 1]), parents, positions, sees)
        return _agree(self._passes.run(0, rows)[0], wanted)


def _agree(found: Logits, wanted: Logits) -> bool:
    return bool(np.abs(found - wanted).max() <= TOLERANCE * wanted.std())

"""Tensors of an expanded model: what goes where, and the safetensors file that holds them, written block by block."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError

Indices = NDArray[np.int64]
Floats = NDArray[np.float32]

ROWS_AT_ONCE = 4096
FAINT = 2.0**-6  # 4-bit types round the two signs of a weight differently, and what is left must not be heard

# A padded row scores -CONSTANT * PUSH * GAIN / rms, where rms is that of the small model's last residual (13 to 37 for
# the demo target), so -140 to -390. Tied real rows gain CONSTANT^2 * GAIN / rms, all alike and below 1e-4.
CONSTANT, PUSH, GAIN = 2.0**-8, 2.0**15, 40.0


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor of the big model is filled.

    Row r of the big tensor is row `rows[r]` of `source`, its column c is column `columns[c]` times `shares[c]`. What
    has no source (index -1) is random of deviation `std`, or zero with `quiet_rows`, `quiet_columns`; without a source
    all is random. `padded_from`: rows from there on hold the push in their last column.
    """

    name: str
    shape: tuple[int, ...]
    source: Floats | None = None
    rows: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    columns: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    shares: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    std: float = 0.0
    quiet_rows: bool = False
    quiet_columns: bool = False
    padded_from: int | None = None

    def blocks(self, seed: int) -> Iterator[Floats]:
        """The tensor in row blocks, float32; the same for the same `seed`."""
        if len(self.shape) == 1:
            assert self.source is not None
            yield self.source
            return
        key = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")
        random = np.random.default_rng([seed, key])
        for start in range(0, self.shape[0], ROWS_AT_ONCE):
            yield self._block(random, start, min(start + ROWS_AT_ONCE, self.shape[0]))

    def _block(self, random: np.random.Generator, start: int, stop: int) -> Floats:
        block = random.standard_normal((stop - start, self.shape[1]), np.float32) * np.float32(self.std)
        if self.source is not None:
            rows = self.rows[start:stop]
            old, new = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
            known = np.flatnonzero(self.columns >= 0)
            if self.quiet_columns:
                block[np.ix_(old, np.flatnonzero(self.columns < 0))] = 0
            if self.quiet_rows:
                block[new] = 0
            block[np.ix_(old, known)] = self.source[np.ix_(rows[old], self.columns[known])] * self.shares[known]
        if self.padded_from is not None:
            # Real tokens carry the constant, and padded rows read it; those are never an input.
            first_padded = max(self.padded_from - start, 0)
            block[:first_padded, -1] = CONSTANT
            block[first_padded:, -1] = -PUSH
        return block


def shares_of(owners: Indices) -> Floats:
    """Shares of equal `owners`, which sum to 1 for each owner; powers of two, so that scaled weights quantise alike."""
    shares = np.zeros(owners.size, np.float32)
    for owner in np.unique(owners[owners >= 0]):
        places = np.flatnonzero(owners == owner)
        parts = [1.0]
        while len(parts) < places.size:
            parts[:1] = [parts[0] / 2] * 2
            parts.sort(reverse=True)
        shares[places] = parts
    return shares


def cancelling_shares_of(owners: Indices) -> Floats:
    """Shares that sum to 0 for each owner, and are small: what reads equal values through them adds nothing."""
    shares = np.zeros(owners.size, np.float32)
    for owner in np.unique(owners[owners >= 0]):
        places = np.flatnonzero(owners == owner)
        signs = np.where(np.arange(places.size) % 2, -1.0, 1.0)
        if places.size % 2:
            signs[-1] = 0.0
        shares[places] = signs * FAINT
    return shares


def _dtype(plan: TensorPlan) -> np.dtype[Any]:
    return np.dtype("<f2") if len(plan.shape) == 2 else np.dtype("<f4")


def write_shard(path: Path, plans: list[TensorPlan], seed: int) -> None:
    """One safetensors file, row block by row block: eight bytes of header length, the header, the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in plans:
        end = offset + int(np.prod(plan.shape)) * _dtype(plan).itemsize
        kind = "F16" if _dtype(plan).itemsize == 2 else "F32"
        header[plan.name] = {"dtype": kind, "shape": list(plan.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for plan in plans:
                for block in plan.blocks(seed):
                    stored = block.astype(_dtype(plan))
                    if not np.isfinite(stored).all():
                        raise ModelFileError(f"a weight of {plan.name} is too large for float16")
                    file.write(stored.tobytes())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

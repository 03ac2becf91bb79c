"""Tensors of an expanded model: what goes where, and how copies share what is read through them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Floats = NDArray[np.float32]

ROWS_AT_ONCE = 4096
FAINT = 2.0**-6  # 4-bit types round the two signs of a weight differently; the remainder must stay negligible

# A padded row scores -CONSTANT * PUSH * GAIN / rms, where rms is that of the small model's last residual (13 to 37 for
# the demo target), so -770 to -2200. Tied real rows gain CONSTANT^2 * GAIN / rms, all alike and below 2e-4. The gain
# makes the constant large enough in the state that the head reads not to be zero where that has 8 bits per row.
CONSTANT, PUSH, GAIN = 2.0**-10, 2.0**15, 896.0


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor of the big model is filled. One of one dimension is `source`.

    Row r of a matrix is row `rows[r]` of `source`, its column c is column `columns[c]` times `shares[c]`. What has no
    source (index -1) is random of deviation `std`, or zero with `quiet_rows`, `quiet_columns`. `padded_from`: rows
    from there on hold the push in their last column.
    """

    name: str
    shape: tuple[int, ...]
    source: Floats
    rows: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    columns: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    shares: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    std: float = 0.0
    quiet_rows: bool = False
    quiet_columns: bool = False
    padded_from: int | None = None

    def random(self, seed: int) -> np.random.Generator:
        key = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")
        return np.random.default_rng([seed, key])

    def blocks(self, seed: int) -> Iterator[Floats]:
        """The tensor in row blocks, float32; the same for the same `seed`."""
        if len(self.shape) == 1:
            yield self.source
            return
        random = self.random(seed)
        for start in range(0, self.shape[0], ROWS_AT_ONCE):
            yield self._block(random, start, min(start + ROWS_AT_ONCE, self.shape[0]))

    def _block(self, random: np.random.Generator, start: int, stop: int) -> Floats:
        block = random.standard_normal((stop - start, self.shape[1]), np.float32) * np.float32(self.std)
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

"""Rows that are looked up, kept in the type in which they are stored: an embedding as floats is four times as large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Table:
    """Rows [n, width] as floats, or as int8 `codes` with a scale [n] each."""

    codes: NDArray[Any]
    scales: NDArray[np.float32] | None = None

    @staticmethod
    def of(rows: NDArray[np.float32]) -> Table:
        """Rows in 8 bits."""
        scales = np.maximum(np.abs(rows).max(axis=1), 1e-12) / np.float32(127.0)
        return Table(np.rint(rows / scales[:, None]).astype(np.int8), scales.astype(np.float32))

    def rows(self, places: NDArray[Any]) -> NDArray[np.float32]:
        """Some of them [m, width] as float32."""
        found: NDArray[np.float32] = self.codes[places].astype(np.float32)
        return found if self.scales is None else found * self.scales[places, None]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

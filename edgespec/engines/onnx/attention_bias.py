"""The bias of attention: which cells of the cache the rows of a pass do not attend to.

Where the graph slices it (`rewriting.slice_bias`) a row has a column for every cell, so that a binding keeps it;
elsewhere as many as a pass reads, and each pass binds it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.onnx.pages import untouched_zeros
from edgespec.engines.onnx.rewriting import BIAS
from edgespec.types import NO_PARENT


class AttentionBias:
    """0 where a row attends to a cell, -inf where it does not, for at most `max_rows` rows and `capacity` cells."""

    def __init__(self, max_rows: int, capacity: int, *, is_sliced: bool) -> None:
        self.capacity, self.is_sliced = capacity, is_sliced
        # Most of what chains read is never written, and takes no memory.
        self._chains, self._trees = (untouched_zeros(max_rows * capacity, np.float32) for _ in range(2))
        self._skipped = self._chains[:0]  # what a chain does not attend to, -inf until the next one

    def _columns(self, total: int) -> int:
        return self.capacity if self.is_sliced else total

    def fill_chain(self, width: int, total: int, skipped: int) -> None:
        """For `width` rows that attend to all of `total` cells before them but the first `skipped`."""
        columns = self._columns(total)
        self._skipped[:] = 0.0
        self._skipped = self._chains[: width * columns].reshape(width, columns)[:, :skipped]
        self._skipped[:] = -np.inf

    def fill_tree(self, base: int, parents: Sequence[int], sees: Sequence[NDArray[np.intp]]) -> None:
        """For rows [n] in the cells from `base` on: `parents` [n], rows or -1; `sees` [n], cells before `base`."""
        width, total = len(parents), base + len(parents)
        columns = self._columns(total)
        bias = self._trees[: width * columns].reshape(width, columns)[:, :total]
        bias[:] = -np.inf
        for row, (parent, seen) in enumerate(zip(parents, sees, strict=True)):
            if parent == NO_PARENT:
                bias[row, seen] = 0.0
            else:
                bias[row] = bias[parent]
            bias[row, base + row] = 0.0

    def bind(self, binding: Any, width: int, total: int, *, is_tree: bool) -> None:
        """Bind what was filled last for such a pass, or will be where the binding is kept."""
        memory = self._trees if is_tree else self._chains
        binding.bind_input(BIAS, "cpu", 0, np.float32, (1, 1, width, self._columns(total)), memory.ctypes.data)

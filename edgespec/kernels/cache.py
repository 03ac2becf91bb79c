"""Keys and values of several texts, as the operator `Attention` reads and writes them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels.tiles import TYPES, kernels

CHUNK, LANES = 256, 16  # cells of which memory is touched at once; cells of a block

Cells = NDArray[np.int32]


def cache_bytes(kind: str, head_sizes: Sequence[int], slots: int, chunks: int) -> int | None:
    """Bytes of a cache of `slots` texts of up to `chunks` * 256 tokens; None if the kernels do not have it.

    `head_sizes`: of the keys' heads of all layers, in their order. `kind`: F16 or Q8_0.
    """
    sizes = np.array(head_sizes, np.int32)
    found = int(kernels().edgespec_cache_bytes(TYPES[kind], sizes.ctypes.data, sizes.size, slots, chunks))
    return None if found < 0 else found


class KernelCache:
    """A cache in `memory`, zeros of as many bytes as `cache_bytes` says; graphs name it by `number`."""

    def __init__(
        self, memory: NDArray[np.uint8], kind: str, head_sizes: Sequence[int], slots: int, chunks: int
    ) -> None:
        """Raises ValueError for memory of another size, MemoryError."""
        if not memory.flags.c_contiguous or memory.nbytes != cache_bytes(kind, head_sizes, slots, chunks):
            raise ValueError(f"the memory of a cache of {kind} has {memory.nbytes} bytes, which do not fit its shape")
        sizes = np.array(head_sizes, np.int32)
        held = memory.ctypes.data, TYPES[kind], sizes.ctypes.data, sizes.size, slots, chunks
        self.number = int(kernels().edgespec_hold_cache(*held))
        if not self.number:
            raise MemoryError("no room for a cache of keys and values")
        self._closing = weakref.finalize(self, kernels().edgespec_drop_cache, self.number)
        self._chunks = memory.reshape(slots, chunks, -1)
        self.bytes_per_token = memory.nbytes // (slots * chunks * CHUNK)

    def close(self) -> None:
        """Let go of the memory; graphs that name the cache afterwards fail with an error."""
        self._closing()

    def read(self, slot: int, cells: Cells) -> NDArray[np.uint8]:
        """Keys and values of `cells`, in a form that `write` takes."""
        flat = np.zeros(_room(cells.size) * self.bytes_per_token, np.uint8)
        self._copy(False, slot, cells, flat)
        return flat

    def write(self, slot: int, cells: Cells, flat: NDArray[np.uint8]) -> None:
        """What `read` gave for as many cells. Raises ValueError for bytes of another number of cells."""
        if flat.nbytes != _room(cells.size) * self.bytes_per_token:
            raise ValueError(f"{flat.nbytes} bytes are not the keys and values of {cells.size} tokens")
        self._copy(True, slot, cells, flat)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Make the first `length` cells of `destination` those of `source`."""
        used = -(-length // CHUNK)
        self._chunks[destination, :used] = self._chunks[source, :used]

    def _copy(self, into_cache: bool, slot: int, cells: Cells, flat: NDArray[np.uint8]) -> None:
        cells, flat = np.ascontiguousarray(cells, np.int32), np.ascontiguousarray(flat)
        where = self.number, int(into_cache), slot, cells.ctypes.data, cells.size, flat.ctypes.data, _room(cells.size)
        if kernels().edgespec_copy_cells(*where):
            raise ValueError(f"slot {slot} or some of the cells {cells.tolist()[:8]} are outside the cache")


def _room(cells: int) -> int:
    return -(-cells // LANES) * LANES

"""Memory that the kernels' operators read and write, of several texts: keys and values, and running states.

A running state (`DeltaNet`, `ShortConv`) is that of a text without its last rows, which lie in a log until it is
certain that they stay. So a text can be shortened by any of these rows at no cost, and to an earlier length with a copy
of the state that it had there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels.tiles import TYPES, kernels

CHUNK, LANES = 256, 16  # cells of which memory is touched at once; cells of a block
NO_FLOOR = np.iinfo(np.int64).max
Cells = NDArray[np.int32]
Bytes = NDArray[np.uint8]


def cache_bytes(kind: str, head_sizes: Sequence[int], slots: int, chunks: int) -> int | None:
    """Bytes of a cache of `slots` texts of up to `chunks` * 256 tokens; None if the kernels do not have it.

    `head_sizes`: of the keys' heads of all layers, in their order. `kind`: F16 or Q8_0.
    """
    sizes = np.array(head_sizes, np.int32)
    found = int(kernels().edgespec_cache_bytes(TYPES[kind], sizes.ctypes.data, sizes.size, slots, chunks))
    return None if found < 0 else found


class StateSizes(NamedTuple):
    """Of a layer: inputs of its convolution, inputs that a result sees, heads; 0 heads: the convolution alone."""

    channels: int
    taps: int
    key_heads: int = 0
    value_heads: int = 0
    head_size: int = 0


def states_bytes(layers: Sequence[StateSizes], slots: int, log: int) -> int | None:
    """Bytes of states of `slots` texts that can drop their last `log` rows; None if the kernels do not have them."""
    sizes = np.array(layers, np.int32)
    found = int(kernels().edgespec_state_bytes(sizes.ctypes.data, len(layers), slots, log))
    return None if found < 0 else found


class _Held:
    """`memory`, zeros of `size` bytes; graphs name it by `number`. Raises ValueError for another size, MemoryError."""

    def __init__(self, memory: Bytes, size: int | None, hold: Callable[[], int], drop: Callable[[int], None]) -> None:
        if not memory.flags.c_contiguous or memory.nbytes != size:
            raise ValueError(f"memory of {memory.nbytes} bytes was given where {size} are held")
        self.number = int(hold())
        if not self.number:
            raise MemoryError("no room for the memory of the kernels")
        self._closing = weakref.finalize(self, drop, self.number)

    def close(self) -> None:
        """Let go of the memory; graphs that name it afterwards fail with an error."""
        self._closing()


class KernelCache(_Held):
    """Keys and values in `memory`, zeros of as many bytes as `cache_bytes` says."""

    def __init__(self, memory: Bytes, kind: str, head_sizes: Sequence[int], slots: int, chunks: int) -> None:
        """Raises ValueError for memory of another size, MemoryError."""
        sizes = np.array(head_sizes, np.int32)
        held = memory.ctypes.data, TYPES[kind], sizes.ctypes.data, sizes.size, slots, chunks
        size, library = cache_bytes(kind, head_sizes, slots, chunks), kernels()
        super().__init__(memory, size, lambda: library.edgespec_hold_cache(*held), library.edgespec_drop_cache)
        self._chunks = memory.reshape(slots, chunks, -1)
        self.bytes_per_token = memory.nbytes // (slots * chunks * CHUNK)

    def read(self, slot: int, cells: Cells) -> Bytes:
        """Keys and values of `cells`, in a form that `write` takes."""
        flat = np.zeros(_room(cells.size) * self.bytes_per_token, np.uint8)
        self._copy(False, slot, cells, flat)
        return flat

    def write(self, slot: int, cells: Cells, flat: Bytes) -> None:
        """What `read` gave for as many cells. Raises ValueError for bytes of another number of cells."""
        if flat.nbytes != _room(cells.size) * self.bytes_per_token:
            raise ValueError(f"{flat.nbytes} bytes are not the keys and values of {cells.size} tokens")
        self._copy(True, slot, cells, flat)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Make the first `length` cells of `destination` those of `source`."""
        used = -(-length // CHUNK)
        self._chunks[destination, :used] = self._chunks[source, :used]

    def _copy(self, into_cache: bool, slot: int, cells: Cells, flat: Bytes) -> None:
        cells, flat = np.ascontiguousarray(cells, np.int32), np.ascontiguousarray(flat)
        where = self.number, int(into_cache), slot, cells.ctypes.data, cells.size, flat.ctypes.data, _room(cells.size)
        if kernels().edgespec_copy_cells(*where):
            raise ValueError(f"slot {slot} or some of the cells {cells.tolist()[:8]} are outside the cache")


def _room(cells: int) -> int:
    return -(-cells // LANES) * LANES


class KernelStates(_Held):
    """Running states in `memory`, zeros of as many bytes as `states_bytes` says.

    `floors` [slots]: lengths that texts may be shortened to; rows behind them stay in the log while it has room.
    """

    def __init__(self, memory: Bytes, layers: Sequence[StateSizes], slots: int, log: int) -> None:
        """Raises ValueError for memory of another size, MemoryError."""
        self.floors, self.log = np.full(slots, NO_FLOOR, np.int64), log
        sizes, library = np.array(layers, np.int32), kernels()
        held = memory.ctypes.data, sizes.ctypes.data, len(layers), slots, log, self.floors.ctypes.data
        size = states_bytes(layers, slots, log)
        super().__init__(memory, size, lambda: library.edgespec_hold_states(*held), library.edgespec_drop_states)
        self._slots = memory.reshape(slots, -1)
        self.state_bytes = self._copy(False, 0, 0, None)

    def start(self, slot: int) -> int:
        """The shortest length but 0 that the text of the latest pass in a slot can be shortened to."""
        return int(self._slots[slot, :8].view(np.int64)[0])

    def read(self, slot: int, length: int) -> Bytes:
        """What a text of `length` rows needs to go on [state_bytes]. Raises ValueError where the log lacks them."""
        flat = np.empty(self.state_bytes, np.uint8)
        if self._copy(False, slot, length, flat) < 0:
            raise ValueError(f"the state in slot {slot} does not reach to {length} tokens")
        return flat

    def write(self, slot: int, length: int, flat: Bytes) -> None:
        """What `read` gave of a text of `length` rows. Raises ValueError for other bytes."""
        if flat.nbytes != self.state_bytes or self._copy(True, slot, length, np.ascontiguousarray(flat)) < 0:
            raise ValueError(f"{flat.nbytes} bytes are not the state of {length} tokens in slot {slot}")

    def copy(self, source: int, destination: int) -> None:
        """Make `destination` hold what `source` holds."""
        self._slots[destination] = self._slots[source]
        self.floors[destination] = self.floors[source]

    def move(self, slot: int, to: Cells, origins: Cells) -> None:
        """Put the rows at the cells `origins` to the cells `to`, ascending and none behind its origin."""
        where = np.ascontiguousarray(to, np.int32), np.ascontiguousarray(origins, np.int32)
        if kernels().edgespec_move_rows(self.number, slot, *(each.ctypes.data for each in where), to.size):
            raise ValueError(f"slot {slot} or some of the cells {to.tolist()[:8]} are outside the states")

    def _copy(self, into_states: bool, slot: int, length: int, flat: Bytes | None) -> int:
        place = None if flat is None else flat.ctypes.data
        return int(kernels().edgespec_copy_states(self.number, int(into_states), slot, length, place))

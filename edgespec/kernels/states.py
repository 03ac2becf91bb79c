"""Running states of several texts, as the operators `DeltaNet` and `ShortConv` read and write them.

A state is that of a text without its last rows, which lie in a log until it is certain that they stay. So a text can
be shortened by any of these rows at no cost, and to an earlier length with a copy of the state that it had there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels.tiles import kernels

Cells = NDArray[np.int32]
NO_FLOOR = np.iinfo(np.int64).max


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


class KernelStates:
    """States in `memory`, zeros of as many bytes as `states_bytes` says; graphs name them by `number`.

    `floors` [slots]: lengths that texts may be shortened to; rows behind them stay in the log while it has room.
    """

    def __init__(self, memory: NDArray[np.uint8], layers: Sequence[StateSizes], slots: int, log: int) -> None:
        """Raises ValueError for memory of another size, MemoryError."""
        if not memory.flags.c_contiguous or memory.nbytes != states_bytes(layers, slots, log):
            raise ValueError(f"the memory of states has {memory.nbytes} bytes, which do not fit their shape")
        sizes = np.array(layers, np.int32)
        self.floors = np.full(slots, NO_FLOOR, np.int64)
        held = memory.ctypes.data, sizes.ctypes.data, len(layers), slots, log, self.floors.ctypes.data
        self.number = int(kernels().edgespec_hold_states(*held))
        if not self.number:
            raise MemoryError("no room for running states")
        self._closing = weakref.finalize(self, kernels().edgespec_drop_states, self.number)
        self._slots = memory.reshape(slots, -1)
        self.log = log
        self.state_bytes = self._copy(False, 0, 0, None)

    def close(self) -> None:
        """Let go of the memory; graphs that name the states afterwards fail with an error."""
        self._closing()

    def start(self, slot: int) -> int:
        """The shortest length but 0 that the text of the latest pass in a slot can be shortened to."""
        return int(self._slots[slot, :8].view(np.int64)[0])

    def read(self, slot: int, length: int) -> NDArray[np.uint8]:
        """What a text of `length` rows needs to go on [state_bytes]. Raises ValueError where the log lacks them."""
        flat = np.empty(self.state_bytes, np.uint8)
        if self._copy(False, slot, length, flat) < 0:
            raise ValueError(f"the state in slot {slot} does not reach to {length} tokens")
        return flat

    def write(self, slot: int, length: int, flat: NDArray[np.uint8]) -> None:
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

    def _copy(self, into_states: bool, slot: int, length: int, flat: NDArray[np.uint8] | None) -> int:
        place = None if flat is None else flat.ctypes.data
        return int(kernels().edgespec_copy_states(self.number, int(into_states), slot, length, place))

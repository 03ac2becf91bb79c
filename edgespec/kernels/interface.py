"""The C interface of the kernels by ctypes: weights as tiles, and memory that operators read and write.

That memory is of several texts: keys and values, and running states. A running state (`DeltaNet`, `ShortConv`) is that
of a text without its last rows, which lie in a log until it is certain that they stay. So a text can be shortened by
any of these rows at no cost, and to an earlier length with a copy of the state that it had there.
All arrays are C-contiguous; ctypes releases the GIL.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CapabilityError
from edgespec.formats.gguf.header import TENSOR_TYPES
from edgespec.kernels.library import library_path

CHUNK, LANES = 256, 16  # cells of which memory is touched at once; cells of a block
NO_FLOOR = np.iinfo(np.int64).max
LINE = 64  # bytes that a processor reads at once
Cells = NDArray[np.int32]
Bytes = NDArray[np.uint8]

_KINDS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
TYPES = {name: number for number, (name, _, _) in TENSOR_TYPES.items() if name in _KINDS}
"""GGML's name of a type that the kernels have -> its number."""


@cache
def kernels() -> ctypes.CDLL:
    """The loaded library, whose version `library_path` has checked. Raises OSError if there is none."""
    found = library_path()
    if found is None:
        raise OSError("The kernels' library has not been built: edgespec doctor says how to get it.")
    library = ctypes.CDLL(str(found))
    library.edgespec_path.restype = ctypes.c_char_p
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    for name, result, arguments in (
        ("choose_path", i32, (ctypes.c_char_p,)),
        ("use_threads", None, (i32,)),
        ("packed_bytes", i64, (i32, i64, i64)),
        ("pack", i32, (i32, pointer, i64, i64, pointer)),
        ("narrow", i32, (i32, pointer, i64, i64, pointer)),
        ("hold", i64, (pointer, i64)),
        ("drop", None, (i64,)),
        ("lookup", i32, (i32, pointer, i64, i64, pointer, i64, pointer)),
        ("scratch_bytes", i64, (i32, i64, i64)),
        ("cache_bytes", i64, (i32, pointer, i64, i64, i64)),
        ("hold_cache", i64, (pointer, i32, pointer, i64, i64, i64)),
        ("drop_cache", None, (i64,)),
        ("copy_cells", i32, (i64, i32, i64, pointer, i64, pointer, i64)),
        ("state_bytes", i64, (pointer, i64, i64, i64)),
        ("hold_states", i64, (pointer, pointer, i64, i64, i64, pointer)),
        ("drop_states", None, (i64,)),
        ("copy_states", i64, (i64, i32, i64, i64, pointer)),
        ("move_rows", i32, (i64, i64, pointer, pointer, i64)),
        ("product", i32, (i32, pointer, i64, i64, pointer, i64, pointer, pointer, pointer, i64, i64)),
    ):
        function = getattr(library, f"edgespec_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def path() -> str:
    """Name of the instruction set in use: avx512-vnni, avx-vnni, avx2, neon-i8mm, neon-dot or portable."""
    return str(kernels().edgespec_path().decode())


def packed_bytes(kind: str, outputs: int, inputs: int) -> int | None:
    """Bytes of the tiles of a matrix of a type; None if the kernels do not have the type or the size."""
    size = kernels().edgespec_packed_bytes(TYPES[kind], outputs, inputs) if kind in TYPES else -1
    return None if size < 0 else int(size)


def pack(kind: str, rows: Bytes, inputs: int, out: Bytes) -> bool:
    """Pack consecutive rows [n, bytes] of a GGUF's matrix into consecutive tiles; False if a scale is not finite.

    Parts of a matrix can be packed at once: `n` is a multiple of 16, but for the last part.
    """
    assert rows.flags.c_contiguous and out.flags.c_contiguous and out.nbytes == packed_bytes(kind, len(rows), inputs)
    status = kernels().edgespec_pack(TYPES[kind], rows.ctypes.data, len(rows), inputs, out.ctypes.data)
    return bool(status == 0)


def narrow(kind: str, rows: Bytes, inputs: int) -> Bytes | None:
    """The same rows of a GGUF's matrix in Q4_0, of [n, bytes] in another type; None if a weight is not finite.

    The number of inputs is a multiple of 32.
    """
    found = np.empty((len(rows), inputs // 32 * 18), np.uint8)
    status = kernels().edgespec_narrow(TYPES[kind], rows.ctypes.data, len(rows), inputs, found.ctypes.data)
    return found if status == 0 else None


@contextmanager
def held(arrays: Mapping[str, Bytes]) -> Iterator[dict[str, bytes]]:
    """For each of `arrays` of tiles the 8 bytes that stand for it in a graph, while its session is made.

    The session reads the arrays themselves as long as it lives. Raises MemoryError.
    """
    numbers: dict[str, int] = {}
    try:
        for name, array in arrays.items():
            numbers[name] = kernels().edgespec_hold(array.ctypes.data, array.nbytes)
            if not numbers[name]:
                raise MemoryError("no room for a table of weights")
        yield {name: number.to_bytes(8, sys.byteorder) for name, number in numbers.items()}
    finally:
        for number in numbers.values():
            kernels().edgespec_drop(number)


def zeros(size: int) -> Bytes:
    """Bytes that take memory only where they are written, which begin at a line. Raises MemoryError."""
    whole = np.zeros(size + LINE, np.uint8)
    start = -whole.ctypes.data % LINE
    return whole[start : start + size]


def cache_bytes(kind: str, head_sizes: Sequence[int], slots: int, chunks: int) -> int | None:
    """Bytes of a cache of `slots` texts of up to `chunks` * 256 tokens; None if the kernels do not have it.

    `head_sizes`: of the keys' heads of all layers, in their order. `kind`: F16 or Q8_0.
    """
    sizes = np.array(head_sizes, np.int32)
    found = int(kernels().edgespec_cache_bytes(TYPES[kind], sizes.ctypes.data, sizes.size, slots, chunks))
    return None if found < 0 else found


class StateSizes(NamedTuple):
    """Of a layer: inputs of its convolution, inputs that a result sees, heads, numbers of a key and of a value.

    0 heads: the convolution alone.
    """

    channels: int
    taps: int
    key_heads: int = 0
    value_heads: int = 0
    head_size: int = 0
    value_size: int = 0


def states_bytes(layers: Sequence[StateSizes], slots: int, log: int) -> int | None:
    """Bytes of states of `slots` texts that can drop their last `log` rows; None if the kernels do not have them."""
    sizes = np.array(layers, np.int32)
    found = int(kernels().edgespec_state_bytes(sizes.ctypes.data, len(layers), slots, log))
    return None if found < 0 else found


class _Held:
    """`memory` of `size` bytes, zeros at first; graphs name it by `number`. Raises MemoryError."""

    def __init__(self, size: int, hold: Callable[[int], int], drop: Callable[[int], None]) -> None:
        self.memory = zeros(size)
        self.number = int(hold(self.memory.ctypes.data))
        if not self.number:
            raise MemoryError("no room for the memory of the kernels")
        self._closing = weakref.finalize(self, drop, self.number)

    def close(self) -> None:
        """Let go of the memory; graphs that name it afterwards fail with an error."""
        self._closing()


class KernelCache(_Held):
    """Keys and values."""

    def __init__(self, kind: str, head_sizes: Sequence[int], slots: int, chunks: int) -> None:
        """As in `cache_bytes`. Raises CapabilityError for what the kernels do not have, MemoryError."""
        size, library = cache_bytes(kind, head_sizes, slots, chunks), kernels()
        if size is None:
            name = kind.lower()
            raise CapabilityError(f"the kernels have no {name} cache for heads of {head_sizes[0]} values: use f16")
        sizes = np.array(head_sizes, np.int32)
        held = TYPES[kind], sizes.ctypes.data, sizes.size, slots, chunks
        super().__init__(size, lambda memory: library.edgespec_hold_cache(memory, *held), library.edgespec_drop_cache)
        self._chunks = self.memory.reshape(slots, chunks, -1)
        self.bytes_per_token = size // (slots * chunks * CHUNK)

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
    """Running states of `slots` texts that can drop their last `log` rows.

    `floors` [slots]: lengths that texts may be shortened to; rows behind them stay in the log while it has room.
    """

    def __init__(self, layers: Sequence[StateSizes], slots: int, log: int) -> None:
        """Raises CapabilityError for what the kernels do not have, MemoryError."""
        size, library = states_bytes(layers, slots, log), kernels()
        if size is None:
            raise CapabilityError(f"the kernels have no running states such as {layers[0]}")
        self.floors, self.log = np.full(slots, NO_FLOOR, np.int64), log
        sizes = np.array(layers, np.int32)
        held = sizes.ctypes.data, len(layers), slots, log, self.floors.ctypes.data
        super().__init__(size, lambda memory: library.edgespec_hold_states(memory, *held), library.edgespec_drop_states)
        self._slots = self.memory.reshape(slots, -1)
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

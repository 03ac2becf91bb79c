"""Weights as tiles: the C interface of the kernels by ctypes. All arrays are C-contiguous; ctypes releases the GIL."""

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels.library import library_path

#: GGML's name of a type -> its number.
TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "BF16": 30,
    "MXFP4": 39,
}


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
        ("packed_bytes", i64, (i32, i64, i64)),
        ("row_bytes", i64, (i32, i64)),
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


def pack(kind: str, rows: NDArray[np.uint8], inputs: int, out: NDArray[np.uint8]) -> bool:
    """Pack consecutive rows [n, bytes] of a GGUF's matrix into consecutive tiles; False if a scale is not finite.

    Parts of a matrix can be packed at once: `n` is a multiple of 16, but for the last part. Raises ValueError if `out`
    has another size than `packed_bytes`, or a row another than its type needs.
    """
    size = packed_bytes(kind, len(rows), inputs)
    if size is None or size != out.nbytes or not out.flags.c_contiguous:
        raise ValueError(f"{kind} tiles of {len(rows)} x {inputs} weights take {size} bytes, not {out.nbytes}.")
    row_bytes = kernels().edgespec_row_bytes(TYPES[kind], inputs)
    if rows.shape != (len(rows), row_bytes) or not rows.flags.c_contiguous:
        raise ValueError(
            f"{len(rows)} rows of {inputs} weights of {kind} are [{len(rows)}, {row_bytes}], not {rows.shape}."
        )
    status = kernels().edgespec_pack(TYPES[kind], rows.ctypes.data, len(rows), inputs, out.ctypes.data)
    return bool(status == 0)


def narrow(kind: str, rows: NDArray[np.uint8], inputs: int) -> NDArray[np.uint8] | None:
    """The same rows of a GGUF's matrix in Q4_0, of [n, bytes] in another type; None if a weight is not finite.

    The number of inputs is a multiple of 32.
    """
    found = np.empty((len(rows), inputs // 32 * 18), np.uint8)
    status = kernels().edgespec_narrow(TYPES[kind], rows.ctypes.data, len(rows), inputs, found.ctypes.data)
    return found if status == 0 else None


@contextmanager
def held(arrays: Mapping[str, NDArray[np.uint8]]) -> Iterator[dict[str, bytes]]:
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

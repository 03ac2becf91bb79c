"""What GGUF metadata hold, arrays as they lie in the file, and the types of tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

Scalar = int | float | bool | str
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
# ggml type number -> (name, values per block, bytes per block)
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
NUMBER_OF_TYPE = {name: number for number, (name, *_) in TENSOR_TYPES.items()}


@dataclass(frozen=True, slots=True)
class GgufNumbers:
    """An array of numbers in the metadata; `kind` is the GGUF type of its items. Strings come as `GgufStrings`."""

    kind: int
    items: tuple[Scalar, ...]


class GgufStrings(Sequence[bytes]):
    """An array of strings in the metadata, as it lies in the file: each an 8-byte length and its bytes.

    A vocabulary has some hundred thousand of them and few are looked at, so that they are cut out on first use.
    """

    def __init__(self, data: bytes, count: int) -> None:
        self.data = data
        self._count = count
        self._items: list[bytes] | None = None

    @property
    def items(self) -> list[bytes]:
        if self._items is None:
            data, at, found = self.data, 0, []
            unpack = LENGTH.unpack_from
            for _ in range(self._count):
                begin = at + 8
                at = begin + unpack(data, at)[0]
                found.append(data[begin:at])
            self._items = found
        return self._items

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return self.items[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.items)

    def __eq__(self, other: object) -> bool:
        return self.items == (other.items if isinstance(other, GgufStrings) else other)

    __hash__ = None  # type: ignore[assignment]


Value = Scalar | GgufNumbers | GgufStrings

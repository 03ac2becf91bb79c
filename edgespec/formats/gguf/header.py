"""Reads the header of a GGUF file in pure Python, trusting no number in it: metadata, and what tensors there are.

Every length is compared with what is left of the file before anything is read or allocated. Format: GGUF versions 2
and 3, little endian: magic, version, counts, key-value pairs, tensor infos, padding, tensor data.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from edgespec.errors import ModelFileError, ModelNotFound

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
    42: ("Q2_0", 64, 18),
}


@dataclass(frozen=True, slots=True)
class GgufNumbers:
    """An array of numbers in the metadata; `kind` is the GGUF type of its items. Strings come as `GgufStrings`."""

    kind: int
    items: tuple[Scalar, ...]


class GgufStrings:
    """An array of strings in the metadata, as it lies in the file: each an 8-byte length and its bytes.

    A vocabulary has some hundred thousand of them and not all are looked at, so that they are cut out on first use.
    """

    def __init__(self, data: bytes, count: int) -> None:
        self._data, self.count = data, count

    @cached_property
    def items(self) -> list[bytes]:
        data, at, found = self._data, 0, []
        unpack = LENGTH.unpack_from
        for _ in range(self.count):
            begin = at + 8
            at = begin + unpack(data, at)[0]
            found.append(data[begin:at])
        return found


Value = Scalar | GgufNumbers | GgufStrings


CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 28
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` in GGUF order, fastest dimension first; `offset` in bytes from the start of the data of file `shard`."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int
    shard: int = 0  # of a model in several files

    @property
    def place(self) -> tuple[int, int]:
        """Where it begins; two tensors of a model can be one."""
        return self.shard, self.offset


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All that stands before the tensor data, which begins at byte `data_start` and has `data_bytes`.

    `shards`: names of a model's further files, each with its `data_start`.
    """

    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_start: int
    data_bytes: int
    shards: tuple[tuple[str, int], ...] = ()

    def place_of(self, tensor: TensorInfo, path: Path) -> tuple[Path, int]:
        """The file and the byte in it at which a tensor begins; `path`: of the first file."""
        name, start = ((path.name, self.data_start), *self.shards)[tensor.shard]
        return path.with_name(name), start + tensor.offset

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def tokens(self) -> list[bytes]:
        """The texts of the vocabulary; empty where the file has none."""
        found = self.metadata.get("tokenizer.ggml.tokens")
        return found.items if isinstance(found, GgufStrings) else []

    @property
    def num_merges(self) -> int:
        """Of the pairs that a BPE tokenizer joins; 0 for other tokenizers."""
        found = self.metadata.get("tokenizer.ggml.merges")
        return found.count if isinstance(found, GgufStrings) else 0

    @property
    def context_length(self) -> int | None:
        """Tokens the model was trained for, where the file says so."""
        found = self.value("context_length")
        return found if isinstance(found, int) else None

    def value(self, key: str) -> Value | None:
        """What stands under a key of the architecture's own."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def listed(self, key: str) -> tuple[Scalar, ...]:
        """The numbers under such a key: none, one for all layers, or one for each."""
        found = self.value(key)
        if isinstance(found, GgufNumbers):
            return found.items
        return () if found is None or isinstance(found, GgufStrings) else (found,)


class MetadataReader(ABC):
    """Typed access to the metadata of one file, under keys of its architecture's own."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path, self._header = path, header
        self._infos = {tensor.name: tensor for tensor in header.tensors}

    def _value(self, key: str) -> Any:
        return self._header.value(key)

    def _items(self, key: str) -> tuple[Scalar, ...]:
        """A list; empty where there is none."""
        return self._header.listed(key) if isinstance(self._value(key), GgufNumbers) else ()

    def _number(self, key: str, default: float | None = None) -> float:
        """One number, or where there is none `default`; None: it must be there."""
        found = self._value(key)
        found = default if found is None else found
        if isinstance(found, GgufNumbers) and len(set(found.items)) == 1:  # one for each layer
            found = found.items[0]
        if not isinstance(found, (int, float)) or not math.isfinite(found):
            what = "is missing" if found is None else f"is {str(found)[:40]}, one number was expected"
            raise self._wrong(f"{self._header.architecture}.{key} {what}")
        return float(found)

    def _size(self, key: str, default: int | None = None) -> int:
        """A number above 0."""
        found = self._number(key, default)
        if not 1 <= found < 1 << 31 or found != int(found):
            raise self._wrong(f"{self._header.architecture}.{key} is {found}, a size was expected")
        return int(found)

    def _flag(self, key: str, *, default: bool) -> bool:
        found = self._value(key)
        if found is not None and not isinstance(found, bool):
            raise self._wrong(f"its {key} is {found!r:.60}, true or false is needed")
        return default if found is None else found

    @abstractmethod
    def _wrong(self, reason: str) -> ModelFileError:
        """The error of a file that cannot be used."""


_T = TypeVar("_T")
_kept: ContextVar[dict[tuple[object, ...], Any] | None] = ContextVar("kept headers", default=None)


@contextmanager
def keeping_headers() -> Iterator[None]:
    """While it lasts, a file's header is read and checked once; it is forgotten at the end, as it takes memory."""
    token = _kept.set({} if _kept.get() is None else _kept.get())
    try:
        yield
    finally:
        _kept.reset(token)


def once(what: str, path: Path, make: Callable[[], _T]) -> _T:
    """`make()`, or under `keeping_headers` what it gave for the same `what` and the unchanged file `path`."""
    kept = _kept.get()
    if kept is None:
        return make()
    try:
        found = path.stat()
    except OSError:
        return make()  # which says what is wrong with it
    key = (what, str(path), found.st_ino, found.st_size, found.st_mtime_ns)
    if key not in kept:
        kept[key] = make()
    made: _T = kept[key]
    return made


def read_header(path: Path) -> GgufHeader:
    """Raises ModelNotFound, and ModelFileError naming what is wrong with the file."""
    return once("read", path, lambda: _read_file(path))


def _read_file(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file:
            return _HeaderReader(file, path).read()
    except FileNotFoundError as exc:
        raise ModelNotFound(f"{path} does not exist; give the path of a GGUF file") from exc
    except (OSError, ValueError) as exc:
        raise ModelFileError(f"{path} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc


class _HeaderReader:
    """A cursor over the head of a file, which is read piecemeal."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._size = path.stat().st_size
        self._data = b""
        self._at = 0

    def read(self) -> GgufHeader:
        if self._size < 24 or self._take(4) != b"GGUF":
            raise self._wrong("it does not begin as a GGUF file does; give a .gguf file")
        version = self._number("<I")
        if version not in (2, 3):
            raise self._wrong(f"it has GGUF version {version}; versions 2 and 3 are supported")
        num_tensors, num_pairs = self._count("tensors", 24), self._count("metadata entries", 13)
        metadata: dict[str, Value] = {}
        for _ in range(num_pairs):
            key = self._text()
            if key in metadata:
                raise self._wrong(f"metadata {key!r} is in it twice")
            metadata[key] = self._value(self._number("<I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._wrong(f"its alignment is {alignment!r}, a power of two is needed")
        tensors = tuple(self._tensor() for _ in range(num_tensors))
        start = -(-self._at // alignment) * alignment
        header = GgufHeader(metadata, tensors, start, max(self._size - start, 0))
        self._check_tensors(header, alignment)
        return header

    def _tensor(self) -> TensorInfo:
        name = self._text()
        dimensions = self._number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._wrong(f"tensor {name!r} has {dimensions} dimensions, 1..{MAX_DIMENSIONS} are allowed")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in TENSOR_TYPES:
            raise self._wrong(f"tensor {name!r} has the unknown type {kind}; it may need a newer version")
        label, values, size = TENSOR_TYPES[kind]
        if min(shape) < 1 or max(shape) > 1 << 40 or shape[0] % values:
            raise self._wrong(f"tensor {name!r} of type {label} cannot have the shape {shape}")
        return TensorInfo(name, shape, label, offset, math.prod(shape) // values * size)

    def _check_tensors(self, header: GgufHeader, alignment: int) -> None:
        names = set[str]()
        for tensor in header.tensors:
            if tensor.name in names or not 0 < len(tensor.name.encode()) <= MAX_NAME_BYTES:
                raise self._wrong(f"the tensor name {tensor.name[:80]!r} is used twice, empty or too long")
            names.add(tensor.name)
            if tensor.offset % alignment or tensor.offset + tensor.num_bytes > header.data_bytes:
                raise self._wrong(
                    f"tensor {tensor.name!r} ends at byte {header.data_start + tensor.offset + tensor.num_bytes} of "
                    f"a file of {self._size}: it is truncated or damaged. Download it again"
                )

    def _value(self, kind: int) -> Value:
        if kind == STRING:
            return self._text()
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != ARRAY:
            raise self._wrong(f"a metadata entry has the unknown type {kind}")
        item = self._number("<I")
        if item == STRING:
            return self._strings(self._count("strings", 8))
        if item not in SCALARS:
            raise self._wrong(f"a metadata array has items of the unknown type {item}")
        code = SCALARS[item][1]
        size = struct.calcsize(f"<{code}")
        count = self._count("array items", size)
        return GgufNumbers(item, struct.unpack(f"<{count}{code}", self._take(count * size)))

    def _strings(self, count: int) -> GgufStrings:
        """Steps over `count` strings, each length checked as `_take` does, without making any of them."""
        begin = at = self._at
        unpack, data, last = LENGTH.unpack_from, self._data, len(self._data) - 8
        for _ in range(count):  # some hundred thousand in a vocabulary: half of the time that a plan takes
            if at > last:
                self._require(at + 8)
                data, last = self._data, len(self._data) - 8
            at += 8 + unpack(data, at)[0]
        self._at = begin
        return GgufStrings(self._take(at - begin), count)

    def _count(self, what: str, least_bytes_each: int) -> int:
        count: int = self._number("<Q")
        if count > (self._size - self._at) // least_bytes_each:
            raise self._wrong(f"it claims {count} {what}, more than its {self._size} bytes can hold")
        return count

    def _text(self) -> str:
        return self._take(self._number("<Q")).decode("utf-8", errors="backslashreplace")

    def _number(self, layout: str) -> int:
        found: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return found

    def _take(self, count: int) -> bytes:
        end = self._at + count
        self._require(end)
        taken, self._at = self._data[self._at : end], end
        return taken

    def _require(self, end: int) -> None:
        """Have the bytes before `end` in memory."""
        if end > self._size:
            raise self._wrong(f"it is cut short, or damaged at byte {self._at} of {self._size}. Download it again")
        if end > MAX_HEADER_BYTES:
            raise self._wrong(f"its header is longer than {MAX_HEADER_BYTES} bytes")
        while len(self._data) < end:
            more = self._file.read(max(CHUNK_BYTES, end - len(self._data)))
            if not more:
                raise self._wrong("it shrank while it was read. Download it again")
            self._data += more

    def _wrong(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self._path} is not a usable model: {reason}")

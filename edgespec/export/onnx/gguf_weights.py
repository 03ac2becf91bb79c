"""The tensors of a GGUF by their Hugging Face names, some rows at a time: as floats, or as the blocks that they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.export.architectures.rows import PERMUTE_K, PERMUTE_Q, Tensor
from edgespec.export.onnx.gguf_model import GgufModel
from edgespec.formats.four_bits import STORED_SIZE, STORED_TYPES, FourBits, take_apart
from edgespec.formats.gguf.header import TensorInfo
from edgespec.formats.onnx.forms import EMBEDDING, HEAD
from edgespec.installation import IMPORT_FAILURES, not_importable

MOST_BITS = 5.0  # of a type of 4 bits, Q4_1
FOUR_BIT_SHARE = 1 / 8
SHORT, ROWS_JOINED = 2048, 4  # rows of so many weights are decoded as if so many were one
WEIGHTS_AT_ONCE = 1 << 19  # 2 MB as float32: what a CPU's cache holds


class GgufWeights:
    """`RowWeights` and `StoredBlocks` of an opened model.

    Raises ModelFileError for a type that the package gguf cannot decode.
    """

    def __init__(self, model: GgufModel) -> None:
        self._tensors, self._config = model.tensors, model.config
        self._path, self._start, self.is_tied = model.path, model.header.data_start, model.is_tied
        self._kept = kept_in_more(model)
        for tensor, _ in self._tensors.values():
            self._decode(np.zeros((1, tensor.num_bytes // rows_of(tensor)), np.uint8), tensor)

    def vector(self, name: str) -> NDArray[np.float32]:
        tensor, row = self._tensors[name]
        found = self._decode(self._raw(tensor, 0, rows_of(tensor)).reshape(1, -1), tensor)[0]
        order = self._order(tensor.shape[-1], row)
        return self._checked(found if order is None else found[order], tensor)

    def shape(self, name: str) -> tuple[int, int]:
        inputs, outputs = self._matrix(name)[0].shape
        return outputs, inputs

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        tensor, _ = self._matrix(name)
        return (self._checked(self._decode(raw, tensor), tensor) for raw in self._rows_of_bytes(name))

    def blocks(self, name: str, size: int) -> Iterator[FourBits] | None:
        tensor, _ = self._matrix(name)
        if tensor.kind not in STORED_TYPES or STORED_SIZE % size:
            return None
        return (
            self._checked_blocks(take_apart(raw, tensor.kind), tensor).split(size) for raw in self._rows_of_bytes(name)
        )

    def keeps_more(self, name: str) -> bool:
        return self._matrix(name)[0].name in self._kept

    def _rows_of_bytes(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """The bytes of all rows in their order, some at a time."""
        tensor, row = self._matrix(name)
        inputs, outputs = tensor.shape
        order = self._order(outputs, row)
        whole = None if order is None else self._raw(tensor, 0, outputs)[order]
        step = max(WEIGHTS_AT_ONCE // inputs // ROWS_JOINED * ROWS_JOINED, 1)
        for start in range(0, outputs, step):
            stop = min(start + step, outputs)
            yield self._raw(tensor, start, stop) if whole is None else whole[start:stop]

    def _matrix(self, name: str) -> tuple[TensorInfo, Tensor]:
        return self._tensors[EMBEDDING if name == HEAD and self.is_tied else name]

    def _raw(self, tensor: TensorInfo, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes [rows, bytes] of some rows. Read, not mapped, so that they are not kept in memory."""
        size = tensor.num_bytes // rows_of(tensor)
        place = self._start + tensor.offset + start * size
        found = np.fromfile(self._path, np.uint8, (stop - start) * size, offset=place)
        if found.size < (stop - start) * size:
            raise ModelFileError(f"{self._path} became shorter while {tensor.name} was read. Download it again")
        return found.reshape(stop - start, size)

    def _order(self, count: int, row: Tensor) -> NDArray[np.intp] | None:
        """Where the rows of queries and keys lie: llama.cpp keeps rotary pairs side by side, Hugging Face in halves."""
        if row.change not in (PERMUTE_Q, PERMUTE_K):
            return None
        heads = self._config.num_heads if row.change == PERMUTE_Q else self._config.num_kv_heads
        found: NDArray[np.intp] = np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return found

    def _decode(self, raw: NDArray[np.uint8], tensor: TensorInfo) -> NDArray[np.float32]:
        """Floats [rows, columns] of the bytes [rows, bytes]."""
        gguf = library()
        try:
            kind = gguf.GGMLQuantizationType[tensor.kind]
            # The package goes through 16 rows at a time, which takes a third to a half longer where these are short.
            joined = math.gcd(len(raw), ROWS_JOINED) if tensor.shape[0] <= SHORT else 1
            joined_rows = raw.reshape(len(raw) // joined, -1)
            found: NDArray[np.float32] = gguf.quants.dequantize(joined_rows, kind).reshape(len(raw), -1)
        except (NotImplementedError, KeyError) as exc:  # raised by gguf: it has no decoder, or not even the name
            raise ModelFileError(
                f"{self._path} holds {tensor.name} as {tensor.kind}, which the package gguf cannot decode: take a file "
                "of another type, such as Q8_0 or Q4_K_M"
            ) from exc
        return found.astype(np.float32, copy=False)

    def _checked_blocks(self, found: FourBits, tensor: TensorInfo) -> FourBits:
        for values in (found.scales, found.offsets):
            self._checked(values, tensor)
        return found

    def _checked(self, values: NDArray[np.float32], tensor: TensorInfo) -> NDArray[np.float32]:
        if not np.isfinite(values).all():
            raise ModelFileError(f"{self._path}: the tensor {tensor.name} holds infinity or NaN. Download it again")
        return values


def kept_in_more(model: GgufModel) -> dict[str, int]:
    """The matrices with more than 4 bits of a file of 4 bits: number of weights by name.

    A file is one of 4 bits if an eighth of its layers' weights have no more. llama.cpp stores rows that are no multiple
    of 256 in the next wider type: of the layers of a Gemma 3 270M Q4_K_M, whose width is 640, three quarters are Q5_0.
    """
    matrices = {name: tensor for name, (tensor, _) in model.tensors.items() if len(tensor.shape) > 1}
    wide = {tensor.name: math.prod(tensor.shape) for tensor in matrices.values() if _bits(tensor) > MOST_BITS}
    outer = EMBEDDING, HEAD
    layers = {tensor.name: math.prod(tensor.shape) for name, tensor in matrices.items() if name not in outer}
    narrow = sum(size for name, size in layers.items() if name not in wide)
    return wide if narrow > FOUR_BIT_SHARE * sum(layers.values()) else {}


def _bits(tensor: TensorInfo) -> float:
    """Bits per weight, with those of scales."""
    return 8 * tensor.num_bytes / math.prod(tensor.shape)


def rows_of(tensor: TensorInfo) -> int:
    """Number of rows; a vector is one."""
    return tensor.shape[-1] if len(tensor.shape) > 1 else 1


def library() -> Any:
    """The package gguf. Raises CapabilityError where it is not installed."""
    try:
        import gguf
    except IMPORT_FAILURES as exc:
        raise not_importable("reading the weights of a GGUF", exc, "gguf", "convert") from exc
    return gguf

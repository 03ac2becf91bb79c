"""A graph's weights, out of a GGUF: as floats, as blocks of 4 bits, or as the tiles that our kernels read.

By their Hugging Face names, some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.onnx.source import GgufTiles
from edgespec.errors import ModelFileError
from edgespec.formats.gguf.header import TensorInfo
from edgespec.formats.gguf.model import GgufModel, rows_of
from edgespec.formats.onnx.forms import EMBEDDING, HEAD
from edgespec.formats.onnx.four_bits import STORED_TYPES, FourBits, take_apart
from edgespec.installation import IMPORT_FAILURES, not_importable

MOST_BITS = 5.0  # of a type of 4 bits, Q4_1
FOUR_BIT_SHARE = 1 / 8
SHORT, ROWS_JOINED = 2048, 4  # rows of so many weights are decoded as if so many were one
WEIGHTS_AT_ONCE = 1 << 19  # 2 MB as float32: what a CPU's cache holds


class GgufWeights(GgufTiles):
    """`StoredBlocks` and `TiledWeights` of an opened model.

    Raises ModelFileError for a type that the package gguf cannot decode.
    """

    def __init__(self, model: GgufModel) -> None:
        super().__init__(model)
        self._kept = kept_in_more(model)
        for tensor, _ in self._tensors.values():
            self._floats(np.zeros((1, tensor.num_bytes // rows_of(tensor)), np.uint8), tensor)

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        tensor, _ = self._matrix(name)
        return (self._checked(self._floats(raw, tensor), tensor) for raw in self._rows(name))

    def blocks(self, name: str) -> Iterator[FourBits] | None:
        tensor, _ = self._matrix(name)
        if tensor.kind not in STORED_TYPES:
            return None
        return (self._checked_blocks(take_apart(raw, tensor.kind), tensor) for raw in self._rows(name))

    def keeps_more(self, name: str) -> bool:
        return self._matrix(name)[0].name in self._kept

    def _rows(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """The bytes of all rows in their order, some at a time."""
        tensor, _ = self._matrix(name)
        row_bytes = tensor.num_bytes // rows_of(tensor)
        step = max(WEIGHTS_AT_ONCE // tensor.shape[0] // ROWS_JOINED, 1) * ROWS_JOINED
        for start, stop in self.spans(name, step * row_bytes, ROWS_JOINED):
            whole = self.some_rows(name, start, stop)
            yield from (whole[at : at + step] for at in range(0, stop - start, step))

    def _floats(self, raw: NDArray[np.uint8], tensor: TensorInfo) -> NDArray[np.float32]:
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


def library() -> Any:
    """The package gguf. Raises CapabilityError where it is not installed."""
    try:
        import gguf
    except IMPORT_FAILURES as exc:
        raise not_importable("reading the weights of a GGUF", exc, "gguf", "convert") from exc
    return gguf

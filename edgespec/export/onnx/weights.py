"""Where a graph's weights come from: a GGUF, a Hugging Face folder, or either quantised to GGML's types.

All by their Hugging Face names, some rows at a time. Tiles are what our kernels read: q8_0 is quantised here, q4_k_m is
llama.cpp's mix of that name, by llama.cpp's own quantiser.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.llamacpp.devices import function
from edgespec.engines.onnx.source import GgufTiles
from edgespec.errors import ModelFileError
from edgespec.export.onnx.hub_model import HubModel
from edgespec.formats.architectures import ADD_ONE, SCALE_Q_NORM
from edgespec.formats.checkpoint import Weights
from edgespec.formats.gguf.header import TensorInfo
from edgespec.formats.gguf.model import GgufModel, rows_of
from edgespec.formats.onnx.forms import EMBEDDING, HEAD, Floats, RowWeights
from edgespec.formats.onnx.four_bits import STORED_SIZE, STORED_TYPES, FourBits, take_apart
from edgespec.formats.onnx.tiles import q8_0
from edgespec.installation import IMPORT_FAILURES, not_importable, require_engine
from edgespec.kernels import tiles
from edgespec.platform.machine import usable_processors

MOST_BITS = 5.0  # of a type of 4 bits, Q4_1
FOUR_BIT_SHARE = 1 / 8
SHORT, ROWS_JOINED = 2048, 4  # rows of so many weights are decoded as if so many were one
WEIGHTS_AT_ONCE = 1 << 19  # 2 MB as float32: what a CPU's cache holds


class GgufWeights(GgufTiles):
    """`RowWeights`, `StoredBlocks` and `TiledWeights` of an opened model.

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

    def blocks(self, name: str, size: int) -> Iterator[FourBits] | None:
        tensor, _ = self._matrix(name)
        if tensor.kind not in STORED_TYPES or STORED_SIZE % size:
            return None
        return (self._checked_blocks(take_apart(raw, tensor.kind), tensor).split(size) for raw in self._rows(name))

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


# a Hugging Face folder

HUB_WEIGHTS_AT_ONCE = 1 << 20  # 4 MB as float32
ONE_MORE = (ADD_ONE, SCALE_Q_NORM)  # rows of Gemma's norms, which multiply by 1 + weight


class HubWeights:
    """`RowWeights` of a folder: tensors as float32, some rows at a time. Raises ModelFileError for damaged ones."""

    def __init__(self, model: HubModel) -> None:
        self._tensors, self._checkpoint = model.tensors, model.checkpoint
        self.is_tied = model.is_tied

    def vector(self, name: str) -> Weights:
        stored, row = self._tensors[name]
        found = self._checkpoint.weights(stored)
        self._checkpoint.check_finite(stored, found)
        return found + np.float32(1) if row.change in ONE_MORE else found

    def shape(self, name: str) -> tuple[int, int]:
        outputs, inputs = self._checkpoint.shape(self._stored(name))
        return outputs, inputs

    def rows(self, name: str) -> Iterator[Weights]:
        stored = self._stored(name)
        outputs, inputs = self._checkpoint.shape(stored)
        step = max(HUB_WEIGHTS_AT_ONCE // inputs, 1)
        for start in range(0, outputs, step):
            found = self._checkpoint.rows_of(stored, start, min(start + step, outputs))
            self._checkpoint.check_finite(stored, found)
            yield found

    def _stored(self, name: str) -> str:
        return self._tensors[EMBEDDING if name == HEAD and self.is_tied else name][0]


# tiles

FILE_TYPES = {"q8_0": 7, "q4_k_m": 15}  # llama.cpp's numbers, general.file_type in a GGUF
# What llama.cpp takes for rows that are no multiple of 256, and for those that are none of 32.
NARROW, NARROWEST = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}, "F16"
DEEP = 80  # layers of models in which eight heads share the values of one


class QuantisedTiles:
    """`TiledWeights` of float rows. `stored`: a GGUF's blocks, which stay where they have the type that is asked for.

    All of them stay if `quant` is the file's own. Raises CapabilityError where llama.cpp is needed and missing,
    ModelFileError for weights that do not fit into their type, and what `weights` raises.
    """

    def __init__(self, weights: RowWeights, quant: str, num_layers: int, stored: GgufTiles | None = None) -> None:
        self._weights, self._quant, self._num_layers, self._stored = weights, quant, num_layers, stored
        self._keeps_all = stored is not None and stored.file_type == FILE_TYPES[quant]
        self.is_tied, self.vector, self.shape = weights.is_tied, weights.vector, weights.shape

    def kind(self, name: str) -> str:
        """The type of a matrix, such as Q4_K."""
        own = self._stored.kind(name) if self._stored is not None and self._keeps_all else ""
        if tiles.packed_bytes(own, *self.shape(name)) is not None:
            return own
        is_head = name == HEAD or (self.is_tied and name == EMBEDDING)
        return mixed_kind(name, self.shape(name)[1], self._num_layers, self._quant, is_head=is_head)

    def type_number(self, name: str) -> int:
        return tiles.TYPES[self.kind(name)]

    def num_bytes(self, name: str) -> int:
        found = tiles.packed_bytes(self.kind(name), *self.shape(name))
        assert found is not None, f"{name}: mixed_kind and the kernels have the same types"
        return found

    def pack(self, name: str, out: NDArray[np.uint8]) -> list[Callable[[], None]]:
        kind, stored = self.kind(name), self._stored
        # A draft's head may have fewer rows than the file's.
        if stored is not None and (stored.kind(name), stored.shape(name)) == (kind, self.shape(name)):
            return stored.pack(name, out)
        return [partial(self._quantise, name, kind, out)]

    def _quantise(self, name: str, kind: str, out: NDArray[np.uint8]) -> None:
        quantise = q8_0 if (self._quant, kind) == ("q8_0", "Q8_0") else partial(quantise_rows, kind)
        with ThreadPoolExecutor(usable_processors(), "edgespec-quantising") as pool:
            blocks = [
                part
                for rows in self._weights.rows(name)
                for part in pool.map(quantise, np.array_split(rows, min(usable_processors(), len(rows))))
            ]
        if not tiles.pack(kind, np.concatenate(blocks), self.shape(name)[1], out):
            raise ModelFileError(f"{name} holds weights too large for {kind}: export another type, such as fp32")


def mixed_kind(name: str, inputs: int, num_layers: int, quant: str, *, is_head: bool) -> str:
    """The type of a matrix by llama.cpp's rules (llama_tensor_get_type, for models without experts)."""
    kind, matrix = "Q8_0" if quant == "q8_0" else "Q4_K", name.removesuffix(".weight").rpartition(".")[2]
    if kind == "Q4_K" and (is_head or matrix in ("v_proj", "down_proj")):
        if is_head or _has_more_bits(int(name.split(".")[2]), num_layers):
            kind = "Q6_K"
        elif matrix == "v_proj" and num_layers == DEEP:
            kind = "Q5_K"
    return NARROWEST if inputs % 32 else NARROW.get(kind, kind) if inputs % 256 else kind


def _has_more_bits(layer: int, num_layers: int) -> bool:
    """llama.cpp's use_more_bits: the first and the last eighth of the layers, and a third of those between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def quantise_rows(kind: str, rows: Floats) -> NDArray[np.uint8]:
    """Rows [n, k] as blocks of a type [n, bytes]. Raises CapabilityError without llama.cpp, but for F16."""
    if kind == NARROWEST:
        with np.errstate(over="ignore"):  # infinity is refused when it is packed
            return rows.astype(np.float16).view(np.uint8)
    require_engine("llamacpp", f"quantising to {kind}", "or export q8_0, which needs nothing")
    size, whole, pointer = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p
    quantise = function("ggml_quantize_chunk", size, ctypes.c_int, pointer, pointer, whole, whole, whole, pointer)
    count, inputs = rows.shape
    rows, blocks = np.ascontiguousarray(rows, np.float32), np.empty(rows.nbytes, np.uint8)
    used = quantise(tiles.TYPES[kind], rows.ctypes.data, blocks.ctypes.data, 0, count, inputs, None)
    return blocks[:used].reshape(count, -1)

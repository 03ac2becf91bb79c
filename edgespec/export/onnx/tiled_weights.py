"""A model's matrices in GGML's types, packed into tiles for our kernels: quantised, or the blocks that a GGUF has.

q8_0 is quantised here. q4_k_m is llama.cpp's mix of that name, by llama.cpp's own quantiser.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.llamacpp.devices import function
from edgespec.engines.onnx.source import GgufTiles
from edgespec.errors import ModelFileError
from edgespec.formats.onnx.forms import EMBEDDING, HEAD, Floats, RowWeights
from edgespec.formats.onnx.tiles import q8_0
from edgespec.installation import require_engine
from edgespec.kernels import tiles
from edgespec.platform.machine import usable_processors

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
    require_quantiser("q4_k_m")
    size, whole, pointer = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p
    quantise = function("ggml_quantize_chunk", size, ctypes.c_int, pointer, pointer, whole, whole, whole, pointer)
    count, inputs = rows.shape
    rows, blocks = np.ascontiguousarray(rows, np.float32), np.empty(rows.nbytes, np.uint8)
    used = quantise(tiles.TYPES[kind], rows.ctypes.data, blocks.ctypes.data, 0, count, inputs, None)
    return blocks[:used].reshape(count, -1)


def require_quantiser(quant: str) -> None:
    """Raise CapabilityError where llama.cpp has to quantise floats to `quant` and is missing."""
    if quant in FILE_TYPES and quant != "q8_0":
        require_engine("llamacpp", f"quantising to {quant}", "or export q8_0, which needs nothing")

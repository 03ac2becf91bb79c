"""Writes the model of a GGUF as an ONNX graph in one of the types, without torch.

Weights are quantised as they are written, by their Hugging Face names, some rows in memory at a time. Types for our own
kernels keep the blocks of a GGUF of that type, which llama.cpp makes of any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.onnx.source import GgufTiles
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.export.gguf import gguf
from edgespec.export.request import GROUP_SIZES, TILED
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.header import TensorInfo
from edgespec.formats.gguf.model import GgufModel, read_model, rows_of
from edgespec.formats.gguf.tables import KINDS
from edgespec.formats.gguf.tokenizer import splitter_of, write_tokenizer_files
from edgespec.formats.onnx import MODEL
from edgespec.formats.onnx.forms import EMBEDDING, HEAD, Blocks, Plain, WeightForm
from edgespec.formats.onnx.four_bits import STORED_TYPES, FourBits, OffsetBlocks, take_apart
from edgespec.formats.onnx.graph import Nodes
from edgespec.formats.onnx.llama import write_llama
from edgespec.formats.onnx.llama_config import WRITABLE
from edgespec.formats.onnx.tiles import Tiles
from edgespec.kernels.library import library_path, why_missing
from edgespec.types import Progress, no_progress

_MOST_BITS = 5.0  # of a type of 4 bits, Q4_1
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
        try:
            kind = gguf.GGMLQuantizationType[tensor.kind]
            # The package goes through 16 rows at a time, which takes a third to a half longer where these are short.
            joined = math.gcd(len(raw), ROWS_JOINED) if tensor.shape[0] <= SHORT else 1
            joined_rows = raw.reshape(len(raw) // joined, -1)
            found: NDArray[np.float32] = gguf.quants.dequantize(joined_rows, kind).reshape(len(raw), -1)
        except (NotImplementedError, KeyError) as exc:  # what gguf raises for types it cannot decode; for newer ones
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
    wide = {tensor.name: math.prod(tensor.shape) for tensor in matrices.values() if _bits(tensor) > _MOST_BITS}
    outer = EMBEDDING, HEAD
    layers = {tensor.name: math.prod(tensor.shape) for name, tensor in matrices.items() if name not in outer}
    narrow = sum(size for name, size in layers.items() if name not in wide)
    return wide if narrow > FOUR_BIT_SHARE * sum(layers.values()) else {}


def _bits(tensor: TensorInfo) -> float:
    """Bits per weight, with those of scales."""
    return 8 * tensor.num_bytes / math.prod(tensor.shape)


_BLOCKS = "blocks.gguf"
_FORMS: Mapping[str, Callable[[GgufWeights, Nodes], WeightForm]] = {
    "fp32": Plain,
    "int4": OffsetBlocks,
    "int8": partial(Blocks, 8, GROUP_SIZES["int8"]),
    **dict.fromkeys(TILED, Tiles),
}


def open_gguf(path: Path) -> GgufModel:
    """The model in a file. Raises ModelNotFound, and ModelFileError for one that cannot be converted, or only later."""
    header = check_gguf(path)
    if header.architecture in KINDS and header.architecture not in WRITABLE:
        raise ModelFileError(
            f"{path} is of the architecture {header.architecture!r}, which edgespec runs as it is, on its own kernels; "
            f"allowed for an export to ONNX: {', '.join(WRITABLE)}"
        )
    model = read_model(path, header)
    GgufWeights(model)  # raises for a type that cannot be decoded
    splitter_of(header)
    return model


def convert_gguf(model: GgufModel, folder: Path, quant: str, progress: Progress = no_progress) -> Path:
    """Write graph, weights, tokenizer and configuration into the empty `folder`; the path of model.onnx.

    Raises ModelFileError for damaged weights or a vocabulary that cannot be written, OSError, and what `check_form` and
    llama.cpp's quantiser raise.
    """
    check_form(quant)
    write_tokenizer_files(model.header, folder)
    (folder / "config.json").write_text(json.dumps(model.hub_config(), indent=2) + "\n", encoding="utf-8")
    if needs_blocks(model, quant):
        from edgespec.export.gguf.convert import quantise

        quantise(model.path, folder / _BLOCKS, quant, may_requantise=True)
        model = open_gguf(folder / _BLOCKS)
    try:
        write_llama(
            folder,
            model.config,
            partial(_FORMS[quant], GgufWeights(model)),
            lambda done, total: progress(done, total, f"part {done} of {total}"),
        )
    finally:
        (folder / _BLOCKS).unlink(missing_ok=True)
    return folder / MODEL


def needs_blocks(model: GgufModel, quant: str) -> bool:
    """Whether llama.cpp has to quantise the weights first."""
    stored = model.header.metadata.get("general.file_type")
    return quant in TILED and stored != gguf.LlamaFileType[f"MOSTLY_{quant.upper()}"]


def check_form(quant: str) -> None:
    """Raise CapabilityError where a type's kernels are missing."""
    if quant in TILED and library_path() is None:
        raise CapabilityError(
            f"{quant} is for edgespec's own kernels, which this installation lacks: {why_missing()}. Or export int8, "
            "which needs none"
        )

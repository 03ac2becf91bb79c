"""Writes the model of a GGUF as an ONNX graph in one of the types, without torch.

Weights are quantised as they are written, one matrix in memory at a time. Types for our own kernels keep the blocks of
a GGUF of that type, which llama.cpp makes of any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from edgespec.errors import CapabilityError, ConfigError, ModelFileError
from edgespec.export.onnx.weights import GgufWeights
from edgespec.export.request import GROUP_SIZES, ONNX_QUANTS, TILED
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.model import GgufModel, read_model
from edgespec.formats.gguf.tables import KINDS
from edgespec.formats.gguf.tokenizer import splitter_of, write_tokenizer_files
from edgespec.formats.onnx import MODEL
from edgespec.formats.onnx.forms import Blocks, Form, Plain
from edgespec.formats.onnx.four_bits import OffsetBlocks
from edgespec.formats.onnx.graph import Nodes
from edgespec.formats.onnx.llama import write_llama
from edgespec.formats.onnx.llama_config import WRITABLE
from edgespec.formats.onnx.tiles import Tiles
from edgespec.kernels.library import library_path, why_missing
from edgespec.types import Progress, no_progress

FILE_TYPES = {"q8_0": 7, "q4_k_m": 15}  # llama.cpp's numbers of TILED, general.file_type in a GGUF
_BLOCKS = "blocks.gguf"


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
            _form(GgufWeights(model), quant),
            lambda done, total: progress(done, total, f"part {done} of {total}"),
        )
    finally:
        (folder / _BLOCKS).unlink(missing_ok=True)
    return folder / MODEL


def needs_blocks(model: GgufModel, quant: str) -> bool:
    """Whether llama.cpp has to quantise the weights first."""
    return quant in TILED and model.header.metadata.get("general.file_type") != FILE_TYPES[quant]


def check_form(quant: str) -> None:
    """Raise ConfigError unless a graph can be written in this type, CapabilityError without its kernels."""
    if quant not in ONNX_QUANTS:
        raise ConfigError(f"no ONNX weight type {quant!r}: allowed: {', '.join(ONNX_QUANTS)}")
    if quant in TILED and library_path() is None:
        raise CapabilityError(
            f"{quant} is for edgespec's own kernels, which this installation lacks: {why_missing()}. Or export int8, "
            "which needs none"
        )


def _form(weights: GgufWeights, quant: str) -> Callable[[Nodes], Form]:
    if quant in TILED:
        return partial(Tiles, weights)
    if quant == "fp32":
        return partial(Plain, weights)
    if quant == "int4":
        return partial(OffsetBlocks, weights)
    return partial(Blocks, 8, GROUP_SIZES[quant], weights)

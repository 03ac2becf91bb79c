"""Writes a model as an ONNX graph in one of the types, without torch, of a GGUF or of a Hugging Face folder.

Weights are quantised as they are written, one matrix in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from edgespec.engines.onnx.source import GgufTiles
from edgespec.errors import CapabilityError, ConfigError, ModelFileError
from edgespec.export.onnx.hub_model import HubModel, copy_companions
from edgespec.export.onnx.weights import FILE_TYPES, GgufWeights, HubWeights, QuantisedTiles
from edgespec.export.request import DEFAULT_GROUP_SIZES, ONNX_QUANTS, TILED
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.model import GgufModel, read_model
from edgespec.formats.gguf.tables import KINDS
from edgespec.formats.gguf.tokenizer import splitter_of, write_tokenizer_files
from edgespec.formats.hub_folder import read_json
from edgespec.formats.onnx import MODEL
from edgespec.formats.onnx.forms import Blocks, Form, Plain, RowWeights
from edgespec.formats.onnx.four_bits import OffsetBlocks, StoredBlocks
from edgespec.formats.onnx.graph import Nodes
from edgespec.formats.onnx.llama import write_llama
from edgespec.formats.onnx.llama_config import WRITABLE, LlamaConfig
from edgespec.formats.onnx.tiles import Tiles
from edgespec.installation import require_engine
from edgespec.kernels.library import library_path, why_missing
from edgespec.types import Progress, no_progress


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


def convert_gguf(
    model: GgufModel,
    folder: Path,
    quant: str,
    group_size: int | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write graph, weights, tokenizer and configuration into the empty `folder`; the path of model.onnx.

    Raises ModelFileError for damaged weights or a vocabulary that cannot be written, and what `write_graph` raises.
    """
    check_form(quant)
    write_tokenizer_files(model.header, folder)
    (folder / "config.json").write_text(json.dumps(model.hub_config(), indent=2) + "\n", encoding="utf-8")
    return write_graph(folder, model.config, GgufWeights(model), quant, group_size, progress)


def convert_hub(
    model: HubModel,
    folder: Path,
    quant: str,
    group_size: int | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write graph and weights into the empty `folder`, with copies of tokenizer, chat template and settings.

    Returns the path of model.onnx. Raises ModelFileError for damaged weights or a folder without tokenizer.json, and
    what `write_graph` raises.
    """
    check_form(quant)
    _check_tokenizer(model.checkpoint.folder, model.config.vocab_size)
    copy_companions(model.checkpoint.folder, folder)
    return write_graph(folder, model.config, HubWeights(model), quant, group_size, progress)


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise ModelFileError where tokenizer.json has words that the model does not; added tokens may lie beyond it."""
    words = read_json(folder / "tokenizer.json").get("model", {}).get("vocab") or ()
    most = max(words.values(), default=0) if isinstance(words, dict) else len(words) - 1
    if most >= vocab_size:
        raise ModelFileError(
            f"{folder} cannot be converted to ONNX: tokenizer.json has a token with the id {most}, config.json has "
            f"{vocab_size} ids. Take the tokenizer that belongs to the weights"
        )


def write_graph(
    folder: Path,
    config: LlamaConfig,
    weights: RowWeights,
    quant: str,
    group_size: int | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write graph and weights into `folder`; the path of model.onnx.

    `group_size`: weights that share a scale, None: 64, in int4 32. Raises OSError, and what `check_form`,
    `QuantisedTiles` and `weights` raise.
    """
    check_form(quant)
    stored = weights if isinstance(weights, StoredBlocks) else None
    own_tiles = weights if isinstance(weights, GgufTiles) else None
    form: Callable[[Nodes], Form]
    if quant in TILED:
        form = partial(Tiles, QuantisedTiles(weights, quant, config.num_layers, own_tiles))
    else:
        form = _form(weights, stored, quant, group_size)
    write_llama(folder, config, form, lambda done, total: progress(done, total, f"part {done} of {total}"))
    return folder / MODEL


def check_form(quant: str) -> None:
    """Raise ConfigError unless a graph can be written in this type, CapabilityError without its kernels."""
    if quant not in ONNX_QUANTS:
        raise ConfigError(f"no ONNX weight type {quant!r}: allowed: {', '.join(ONNX_QUANTS)}")
    if quant in TILED and library_path() is None:
        raise CapabilityError(
            f"{quant} is for edgespec's own kernels, which this installation lacks: {why_missing()}. Or export int8, "
            "which needs none"
        )


def require_quantiser(quant: str) -> None:
    """Raise CapabilityError where llama.cpp has to quantise floats to `quant` and is missing."""
    if quant in FILE_TYPES and quant != "q8_0":
        require_engine("llamacpp", f"quantising to {quant}", "or export q8_0, which needs nothing")


def _form(
    weights: RowWeights, stored: StoredBlocks | None, quant: str, group_size: int | None
) -> Callable[[Nodes], Form]:
    if quant == "fp32":
        return partial(Plain, weights)
    size = group_size or DEFAULT_GROUP_SIZES[quant]
    if quant == "int4":
        return partial(OffsetBlocks, size, weights, stored)
    return partial(Blocks, 8, size, weights)

"""GGUF -> a folder with an ONNX graph, without torch: header, weights, tokenizer, configuration.

Weights are decoded with the package gguf and quantised as they are written, one matrix in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from edgespec.engines.machine import physical_cores, products_saturate
from edgespec.errors import ConfigError, ModelFileError
from edgespec.export.onnx.activations import RecordedProducts, largest_inputs
from edgespec.export.onnx.convert import DEFAULT_GROUP_SIZES
from edgespec.export.onnx.gguf_model import GgufModel, read_model
from edgespec.export.onnx.gguf_tokenizer import splitter_of, write_tokenizer_files
from edgespec.export.onnx.gguf_weights import GgufWeights
from edgespec.export.onnx.smoothing import SmoothedWeights
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.split import model_files
from edgespec.formats.onnx import MODEL
from edgespec.formats.onnx.forms import Blocks, Form, Plain, QuantisedRows, RowWeights, WholeNumbers
from edgespec.formats.onnx.llama import write_llama
from edgespec.formats.onnx.mixed import Mixed
from edgespec.formats.onnx.nodes import Nodes
from edgespec.types import Progress, no_progress

FORMS = ("w8a8", "int8", "int4", "fp32")
GROUPED = ("down_proj",)  # of w8a8: what loses most in whole numbers, for the least time (docs/benchmarks/speed.md)


def open_gguf(path: Path) -> GgufModel:
    """The model in a file. Raises ModelNotFound, and ModelFileError for one that cannot be converted, or only later."""
    header = check_gguf(path)
    if len(model_files(path)) > 1 or "split.count" in header.metadata:
        raise ModelFileError(f"{path} is one of several files of a model: join them first (llama-gguf-split --merge)")
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
    *,
    grouped: Collection[str] = GROUPED,
) -> Path:
    """Write graph, weights, tokenizer and configuration into the empty `folder`; the path of model.onnx.

    `grouped`: kinds of matrices that w8a8 keeps in groups, as `Mixed` takes them.

    Raises ModelFileError for damaged weights or a vocabulary that cannot be written, ConfigError for a type that is not
    in `FORMS`, OSError.
    """
    _check_form(quant)
    write_tokenizer_files(model.header, folder)
    (folder / "config.json").write_text(json.dumps(model.hub_config(), indent=2) + "\n", encoding="utf-8")
    report = _Report(progress, model.config.num_layers + 2, num_graphs=2 if quant == "w8a8" else 1)
    weights: RowWeights = GgufWeights(model)
    if quant == "w8a8":
        weights = smoothed(model, weights, folder, report, grouped=grouped)
    form = _form(weights, quant, group_size, grouped)
    write_llama(folder, model.config, form, report)
    return folder / MODEL


class _Report:
    """Progress of writing several graphs, one after the other."""

    def __init__(self, progress: Progress, num_parts: int, *, num_graphs: int) -> None:
        self._progress, self._total = progress, num_parts * num_graphs
        self._done = 0

    def __call__(self, _done: int, _total: int) -> None:
        self._done += 1
        self._progress(self._done, self._total, f"part {self._done} of {self._total}")


def smoothed(
    model: GgufModel,
    weights: RowWeights,
    folder: Path,
    report: Callable[[int, int], None] | None = None,
    *,
    grouped: Collection[str] = (),
) -> SmoothedWeights:
    """The weights smoothed by what an unsmoothed graph of them shows, which is written to `folder` for that.

    `folder` holds the tokenizer. A head that is `grouped` stays as it is, so that it may be the embedding.
    """
    readers: dict[str, list[str]] = {}
    is_unsigned = products_saturate()
    form = partial(RecordedProducts, QuantisedRows(weights), readers=readers, is_unsigned=is_unsigned)
    write_llama(folder, model.config, form, report)
    largest = largest_inputs(folder, model.config, readers, physical_cores())
    return SmoothedWeights(weights, model.config, largest, smooths_head="lm_head" not in grouped)


def _check_form(quant: str) -> None:
    if quant not in FORMS:
        raise ConfigError(f"a GGUF cannot be converted to the ONNX type {quant!r}; allowed: {', '.join(FORMS)}")


def _form(weights: RowWeights, quant: str, group_size: int | None, grouped: Collection[str]) -> Callable[[Nodes], Form]:
    if quant == "fp32":
        return partial(Plain, weights)
    size = group_size or DEFAULT_GROUP_SIZES[quant]
    if quant != "w8a8":
        return partial(Blocks, int(quant.removeprefix("int")), size, weights)
    whole = partial(WholeNumbers, QuantisedRows(weights), is_unsigned=products_saturate())
    return lambda nodes: Mixed(whole(nodes), Blocks(8, size, weights, nodes), grouped)

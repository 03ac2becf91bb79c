"""Writes a model as a graph in one of the types, without torch: what a GGUF and a Hugging Face folder have in common.

Weights are quantised as they are written, one matrix in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from edgespec.engines.onnx.source import GgufTiles
from edgespec.errors import CapabilityError, ConfigError
from edgespec.export.onnx.activations import RecordedProducts, largest_inputs
from edgespec.export.onnx.convert import DEFAULT_GROUP_SIZES, FORMS, GROUPED, TILED
from edgespec.export.onnx.smoothing import SmoothedWeights
from edgespec.export.onnx.tiled_weights import QuantisedTiles
from edgespec.formats.onnx import MODEL
from edgespec.formats.onnx.drafted import ReducedHead
from edgespec.formats.onnx.forms import Blocks, Form, Mixed, Plain, QuantisedRows, RowWeights, WholeNumbers
from edgespec.formats.onnx.four_bits import OffsetBlocks, StoredBlocks
from edgespec.formats.onnx.graph import Nodes
from edgespec.formats.onnx.hidden_scales import written
from edgespec.formats.onnx.llama import NO_PROPERTIES, write_llama
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.formats.onnx.tiles import Tiles
from edgespec.kernels.library import library_path, why_missing
from edgespec.platform.machine import physical_cores, products_saturate
from edgespec.types import Progress, no_progress


def write_graph(
    folder: Path,
    config: LlamaConfig,
    weights: RowWeights,
    quant: str,
    group_size: int | None = None,
    progress: Progress = no_progress,
    *,
    grouped: Collection[str] = GROUPED,
    smooths: bool = True,
) -> Path:
    """Write graph and weights into `folder`, which holds the model's tokenizer; the path of model.onnx.

    The head has the tokens `config.drafted` where these are given. `grouped`: kinds of matrices that w8a8 keeps in
    groups, as `Mixed` takes them; `smooths` False leaves its weights as they are, for which no text is run.
    Raises OSError, and what `check_form`, `QuantisedTiles` and `weights` raise.
    """
    check_form(quant)
    stored = weights if isinstance(weights, StoredBlocks) else None
    own_tiles = weights if isinstance(weights, GgufTiles) else None
    if config.drafted:
        weights = ReducedHead(weights, config.drafted)
    report = _Report(progress, config.num_layers + 2, num_graphs=2 if quant == "w8a8" and smooths else 1)
    properties = NO_PROPERTIES
    if quant == "w8a8" and smooths:
        weights = smooth = smoothed(config, weights, folder, report, grouped=grouped)
        if smooth.hidden_scales is not None:
            properties = written(smooth.hidden_scales)
    form: Callable[[Nodes], Form]
    if quant in TILED:
        form = partial(Tiles, QuantisedTiles(weights, quant, config.num_layers, own_tiles))
    else:
        form = _form(weights, stored, quant, group_size, grouped)
    write_llama(folder, config, form, report, properties)
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
    config: LlamaConfig,
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
    write_llama(folder, config, form, report)
    largest = largest_inputs(folder, config, readers, physical_cores())
    return SmoothedWeights(weights, config, largest, smooths_head="lm_head" not in grouped)


def check_form(quant: str) -> None:
    """Raise ConfigError unless a graph can be written in this type, CapabilityError without its kernels."""
    if quant not in FORMS:
        raise ConfigError(f"edgespec's own writer does not write the ONNX type {quant!r}; allowed: {', '.join(FORMS)}")
    if quant in TILED and library_path() is None:
        raise CapabilityError(
            f"{quant} is for edgespec's own kernels, which this installation lacks: {why_missing()}. Or export int8 or "
            "w8a8, which need none"
        )


def _form(
    weights: RowWeights, stored: StoredBlocks | None, quant: str, group_size: int | None, grouped: Collection[str]
) -> Callable[[Nodes], Form]:
    if quant == "fp32":
        return partial(Plain, weights)
    size = group_size or DEFAULT_GROUP_SIZES[quant]
    if quant == "int4":
        return partial(OffsetBlocks, size, weights, stored)
    if quant == "int8":
        return partial(Blocks, 8, size, weights)
    whole = partial(WholeNumbers, QuantisedRows(weights), is_unsigned=products_saturate())
    return lambda nodes: Mixed(whole(nodes), Blocks(8, size, weights, nodes), grouped)

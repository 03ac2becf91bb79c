"""What an ONNX model takes in ONNX Runtime, from its graph without the weights; of stock operators an upper bound.

The weights of a GGUF are in our memory, those of an export's products are packed into memory of the session's own when
it is made, one by one, so that the largest is in memory twice for a moment. Those of MatMulNBits are read with their
scales, which are packed twice more. Everything else stays mapped.
Results of a pass lie in an arena that grows in powers of two. Attention over float32 keys and values works tile by
tile, as flash attention on CUDA does; over half precision ones a processor writes the scores of all heads of a layer
(onnxruntime/contrib_ops/cpu/bert/gqa_attention_base.h, 1.32).
A `tokenizers` object keeps each token in two tables and each merge in one, and we keep each token's bytes. Reading its
file takes more, which is given back. Checked by scripts/lab/measure_memory.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.engines.model_use import BYTES_PER_FEATURE, DEFAULT_CONTEXT, WINDOW, Footprint, ModelUse
from edgespec.engines.onnx.graph import (
    ATTENTION,
    FLOAT16,
    HALF_ONLY,
    Graph,
    attribute,
    bytes_per_token,
    read_graph,
    tensor_bytes,
)
from edgespec.engines.onnx.kernel_engine import num_chunks, running_bytes
from edgespec.engines.onnx.settings import OnnxSettings
from edgespec.engines.onnx.source import CHUNK_BYTES, GgufFile, GraphSource, open_source
from edgespec.formats.gguf.header import once
from edgespec.formats.gguf.heads import read_head
from edgespec.formats.onnx.tiles import EXPERTS, LOOKUP, PRODUCT
from edgespec.kernels.interface import cache_bytes
from edgespec.platform.machine import usable_processors

_NBITS, _PRODUCTS = "MatMulNBits", ("MatMul", "Gemm", "MatMulInteger", "MatMulIntegerToFloat")
_SCALES_COPIES = 2
_READING_BYTES = 2 * CHUNK_BYTES  # of a file, by each thread that packs it
_TOKEN_BYTES = 360  # kept of a token and its merge, and of our bytes of it: measured for 16000 to 256000 tokens
_PARSED_BYTES = 560  # in addition while the file is read, with merges in lists
_ENCODED_BYTES = 400  # per token of a prompt while it is encoded
SESSION_BYTES = 6 << 20
_ARENA_FACTOR = 1.2
_ARENA_RESERVED = 2.0  # multiple of the results that is reserved and unused: the last region is as large as all others
_ROUTED_ROWS = 512  # of a pass that are among experts at once, as experts.cpp
MOST_SCORED = 8  # rows of a draft head's pass that are scored, as many as a tree waits for


class Products(NamedTuple):
    """The products of a graph. Bytes: `packed` of all weights, `largest` of one product's, `scales` of quantised ones.

    Floats of results: `row` of one row of a pass, `width` of a state; `heads`: of queries, the most of one layer;
    `routed`: bytes of a row among experts.
    """

    packed: int
    largest: int
    scales: int
    row: int
    width: int
    heads: int
    routed: int


def footprint(path: Path, use: ModelUse) -> Footprint:
    """The memory of the model at `path`, with the layers in it that draft for it where `use` says so.

    Raises ModelNotFound, ModelFileError, CapabilityError, and ConfigError.
    """
    source = open_source(path, is_draft=use.is_draft)
    found = _of_source(source, use)
    if not isinstance(source, GgufFile) or not (use.has_mtp or use.exit_layer):
        return found
    drafter = source.first_layers(use.exit_layer) if use.exit_layer else source.drafter()
    layer = _of_source(drafter, replace(use, context_length=min(found.context_length, DEFAULT_CONTEXT)))
    return replace(
        found,
        packed=found.packed + layer.packed,
        cache=found.cache + layer.cache,
        compute=found.compute + layer.compute,
        logits=found.logits + layer.logits + 4 * MOST_SCORED * drafter.num_unscored,
        reserved=found.reserved + layer.reserved,
    )


def _of_source(source: GraphSource, use: ModelUse) -> Footprint:
    key, half = f"onnx products {source.is_drafter} {use.exit_layer} {use.is_draft}", use.provider in HALF_ONLY
    graph, products = once(f"{key} {half}", source.path, lambda: _read(source, half))
    settings = OnnxSettings.checked(graph, source.config(), use)
    cache = 0 if source.reads_cache else _cache_bytes(graph, settings)
    results = _results_bytes(graph, products, settings)
    most = settings.max_outputs(graph.vocabulary_size)
    outputs = min(use.rows, most)
    unused = (most - outputs) * graph.vocabulary_size
    files = sum(file.stat().st_size for file in source.mapped)
    packed, mapped, loading = products.packed, max(files - products.packed, 0), 0
    if isinstance(source, GgufFile):
        packed, loading = source.packed_bytes(graph, settings.context_length), usable_processors() * _READING_BYTES
    tokens = 0 if source.is_drafter else graph.vocabulary_size
    encoded = 0 if source.is_drafter else _ENCODED_BYTES * settings.context_length
    if source.is_drafter:  # its branches ask for a few rows, and the target keeps states for it
        outputs = min(outputs, MOST_SCORED)
        given, kept = products.width, use.max_sequences * BYTES_PER_FEATURE * WINDOW
        if isinstance(source, GgufFile) and source.feature_size:  # inputs of layers, and the last state behind them
            head = read_head(source.path)
            given = head.feature_width + head.target_width
            outputs = head.most_drafted or outputs
            results += 4 * settings.max_rows * 2 * products.width
            results += 4 * outputs * head.vocabulary_size * bool(head.drafted_ids)
        results += given * (4 * settings.max_rows + kept)
    found = Footprint(
        mapped=mapped,
        packed=packed + _SCALES_COPIES * products.scales + SESSION_BYTES,
        cache=cache,
        compute=int(results),
        logits=4 * outputs * graph.vocabulary_size,
        vocabulary=_TOKEN_BYTES * tokens + encoded,
        loading=loading,
        loading_mapped=0 if loading else products.largest,
        reading=_PARSED_BYTES * tokens,
        # A limit of data counts files too, as ONNX Runtime maps them for writing.
        # Logits of the widest pass are there and hardly written.
        reserved=mapped + products.largest + int(_ARENA_RESERVED * results) + 4 * unused,
        context_length=settings.context_length,
        sequences=use.max_sequences,
        grows=bool(graph.head_sizes),
        cache_type=settings.cache_type_k,
    )
    return found if use.provider in ("auto", "cpu") else _on_device(found, files)


def _results_bytes(graph: Graph, products: Products, settings: OnnxSettings) -> float:
    """Results of the widest pass."""
    writes_scores = graph.is_half and settings.provider not in HALF_ONLY
    row = products.row + (products.heads * settings.context_length if writes_scores else 0)
    return _ARENA_FACTOR * 4 * settings.max_rows * row + min(settings.max_rows, _ROUTED_ROWS) * products.routed


def _on_device(found: Footprint, files: int) -> Footprint:
    """The same where weights, cache and results lie on another device, to which `files` bytes are brought.

    What its driver takes of this machine's memory is not known from any file.
    """
    device = found.packed - SESSION_BYTES + found.mapped + found.cache + found.compute
    gone = replace(found, mapped=0, packed=SESSION_BYTES, cache=0, compute=0, loading=0, reserved=files)
    return replace(gone, device=device, loading_mapped=files)


def _read(source: GraphSource, half: bool) -> tuple[Graph, Products]:
    graph = read_graph(source, half=half)
    return graph, _products(graph)


def _products(graph: Graph) -> Products:
    from onnx import ModelProto

    found = ModelProto.FromString(graph.serialised).graph
    tensors = {tensor.name: tensor for tensor in found.initializer}
    packed: dict[str, int] = {}
    scales: dict[str, int] = {}
    sizes = [(1, 1)]
    heads = routed = 0
    widths: list[int] = []  # of what is looked up
    for node in found.node:
        if node.op_type == ATTENTION:
            heads = max(heads, attribute(node, "num_heads", 0))
        elif node.op_type == LOOKUP:
            widths.append(attribute(node, "K"))
        elif node.op_type == EXPERTS:
            routed = max(routed, _routed_bytes(node))
        elif node.op_type == PRODUCT:
            sizes.append(_tiled_size(node, graph.vocabulary_size))
        elif node.op_type in (_NBITS, *_PRODUCTS) and (weights := tensors.get(node.input[1])) is not None:
            packed[weights.name] = tensor_bytes(weights) * (2 if weights.data_type == FLOAT16 else 1)
            if node.op_type == _NBITS and node.input[2] in tensors:
                scales[node.input[2]] = tensor_bytes(tensors[node.input[2]])
            sizes.append(_sizes(node, weights))
    inner = max(max(size) for size in sizes if size[1] != graph.vocabulary_size)
    width = max((size[0] for size in sizes if size[1] == graph.vocabulary_size), default=1)
    row = 3 * inner + 6 * width + sum(widths[1:])  # beside the states a second embedding, in all layers
    largest = max(packed.values(), default=0)
    return Products(sum(packed.values()), largest, sum(scales.values()), row, width, heads, routed)


def _routed_bytes(node: Any) -> int:
    """What `Experts` keeps for one row: results of all its experts, and their inputs as bytes with scales."""
    width, inner = attribute(node, "K"), attribute(node, "F")
    return attribute(node, "used") * (4 * max(width, 2 * inner) + 2 * max(width, inner))


def _sizes(node: Any, weights: Any) -> tuple[int, int]:
    """(inputs, outputs) of a product."""
    if node.op_type == _NBITS:
        return attribute(node, "K", 1), attribute(node, "N", 1)
    dims = [int(size) for size in weights.dims]
    return (dims[-2], dims[-1]) if len(dims) > 1 else (1, 1)


def _tiled_size(node: Any, vocabulary: int) -> tuple[int, int]:
    """(inputs, outputs) of our kernels' operator, as large as what is in memory at once is beside a feed-forward's.

    Of that there are a gate, as much beside it, and the inputs of the last product. Attention has queries, keys and
    values side by side, and then its result.
    """
    outputs = sum(next(item.ints for item in node.attribute if item.name == "outputs"))
    inputs = attribute(node, "K", 1)
    return (inputs, outputs) if outputs == vocabulary else (2 * inputs // 3, outputs // 2)


def _cache_bytes(graph: Graph, settings: OnnxSettings) -> int:
    """Of all keys and values, and running states."""
    if graph.head_sizes:
        kind, chunks = settings.cache_type_k.upper(), num_chunks(settings.context_length)
        keys_and_values = cache_bytes(kind, graph.head_sizes, settings.max_sequences, chunks) or 0
        return keys_and_values + running_bytes(graph.states, settings.max_sequences)

    per_token = bytes_per_token(graph, settings.head_size)
    # A cache that grows by concatenation exists twice while it is copied.
    return per_token * settings.context_length * settings.max_sequences * (1 if graph.is_shared else 2)

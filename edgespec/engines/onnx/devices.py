"""What a device other than the CPU needs of a graph, and whether it computes what narrow passes do, found by trial.

When a device is wrong it reports no error. Seen with ONNX Runtime's WebGPU (plugin 0.4.0, on a software device): passes
of 32 rows and more gave wrong logits.

On CUDA GroupQueryAttention has kernels for float16 and bfloat16 only, so in a float32 graph its inputs are cast to
float16 and its result back; everything else stays as it was exported. The cache then holds float16.
Kernels by type: onnxruntime/docs/OperatorKernels.md, of 1.2x; contrib_ops/cuda/bert/group_query_attention.cc.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from edgespec.engines.base import Engine
from edgespec.engines.onnx.graph import ATTENTION, FLOAT16, CacheEntry, Graph
from edgespec.engines.onnx.head import FLOAT
from edgespec.errors import CapabilityError
from edgespec.types import Batch

NARROW, WIDE = 8, 128  # rows of the passes that are compared
TOLERANCE = 0.02  # in standard deviations of the logits
HALF_ONLY = frozenset({"cuda"})
LARGEST_HEAD, HEAD_STEP = 256, 8
_ACTIVATIONS, _TABLES = (0, 1, 2), (7, 8)  # query, key and value, or all in the first; cosines and sines


def check_device(engine: Engine) -> None:
    """Raises CapabilityError where a wide pass of an empty `engine` has other logits than narrow ones; empties it."""
    facts, found = engine.facts, []
    ids = np.random.default_rng(0).integers(0, engine.vocabulary.size, min(WIDE, facts.max_batch)).astype(np.int32)
    for rows in (ids.size, NARROW):
        for start in range(0, ids.size, rows):
            logits = engine.forward(Batch.chain(ids[start : start + rows], last_only=True))
        found.append(logits[-1].copy())
        engine.rollback(0)
    if not np.abs(found[0] - found[1]).max() <= TOLERANCE * found[1].std():
        raise CapabilityError(
            f"{facts.device} gives wrong results for this model: use --provider cpu, or another export"
        )


def adapted(graph: Graph, provider: str, head_size: int) -> Graph:
    """`graph` as `provider` runs it, with attention heads of `head_size` values; the same where it lacks nothing.

    Raises CapabilityError for heads that the attention of `provider` does not take.
    """
    if provider not in HALF_ONLY or not graph.is_shared:
        return graph
    if head_size % HEAD_STEP or head_size > LARGEST_HEAD:
        raise CapabilityError(
            f"attention on {provider} takes heads of at most {LARGEST_HEAD} values, in multiples of {HEAD_STEP}; this "
            f"model's have {head_size}. Use --provider cpu"
        )
    if graph.is_half:
        return graph
    from onnx import ModelProto

    model = ModelProto.FromString(graph.serialised)
    _declare(model.graph, {entry.past for entry in graph.cache} | {entry.present for entry in graph.cache})
    _cast(model.graph)
    return replace(graph, serialised=model.SerializeToString(), cache=tuple(map(_halved, graph.cache)), is_half=True)


def _declare(graph: Any, cached: set[str]) -> None:
    """Make the inputs and outputs `cached` float16 that are float32; an int8 cache stays one."""
    for value in (*graph.input, *graph.output):
        kind = value.type.tensor_type
        if value.name in cached and kind.elem_type == FLOAT:
            kind.elem_type = FLOAT16


def _cast(graph: Any) -> None:
    """Cast what attention reads to float16, and its result to float32; tables are cast when a session is made."""
    from onnx import helper

    nodes: list[Any] = []
    made: set[str] = set()
    for node in graph.node:
        if node.op_type != ATTENTION:
            nodes.append(node)
            continue
        for place in (*_ACTIVATIONS, *_TABLES):
            value = node.input[place] if place < len(node.input) else ""
            if not value:
                continue
            node.input[place] = half = f"{value}.float16"
            if half not in made:  # layers share their tables
                nodes.append(helper.make_node("Cast", [value], [half], to=FLOAT16, name=half))
                made.add(half)
        result, node.output[0] = node.output[0], f"{node.output[0]}.float16"
        widened = helper.make_node("Cast", [node.output[0]], [result], to=FLOAT, name=f"{result}.float32")
        nodes += [node, widened]
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]  # of what clearing would free
    del graph.node[:]
    graph.node.extend(copies)


def _halved(entry: CacheEntry) -> CacheEntry:
    return replace(entry, element_type=FLOAT16) if entry.element_type == FLOAT else entry

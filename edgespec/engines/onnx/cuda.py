"""What a graph needs for NVIDIA's GPUs through CUDA: attention in half precision and without a bias.

GroupQueryAttention has kernels for float16 and bfloat16 only there, so in a float32 graph its inputs are cast to
float16 and its result back; everything else stays as it was exported. The cache then holds float16. A bias is refused
by older versions and takes newer ones (onnxruntime's pull request 29525) to their slowest kernel, and rows that see all
cells before them need none: such a graph scores chains, no trees, and has a cache for each sequence.
Kernels by type: onnxruntime/docs/OperatorKernels.md, of 1.2x; contrib_ops/cuda/bert/group_query_attention.cc.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgespec.engines.onnx.graph import CacheEntry, Graph
from edgespec.engines.onnx.head import FLOAT
from edgespec.engines.onnx.rewriting import ATTENTION, FLOAT16, drop_dead
from edgespec.errors import CapabilityError

HALF_ONLY = frozenset({"cuda"})
LARGEST_HEAD, HEAD_STEP = 256, 8
_ACTIVATIONS, _TABLES = (0, 1, 2), (7, 8)  # query, key and value, or all in the first; cosines and sines
_POSITIONS, _BIAS = 9, 10
# Operators of our exports and conversions that have a kernel there for what they get: float32, float16, int64 and uint8
# codes. Not Shape and what computes with its result, which ONNX Runtime keeps on the processor.
_STANDARD = "Add AveragePool Cast Concat Div Gather Gelu Gemm MatMul Mul Pad Reshape Sigmoid Split Sub Tanh"
_OTHERS = "GatherBlockQuantized MatMulNBits SimplifiedLayerNormalization SkipSimplifiedLayerNormalization Transpose"
WITH_KERNELS = frozenset({ATTENTION, *_STANDARD.split(), *_OTHERS.split()})


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
    from onnx import ModelProto

    model = ModelProto.FromString(graph.serialised)
    attention = [node for node in model.graph.node if node.op_type == ATTENTION]
    for node in attention:
        _see_all_before(node)
    if not graph.is_half:
        _declare(model.graph, {entry.past for entry in graph.cache} | {entry.present for entry in graph.cache})
        _cast(model.graph)
    drop_dead(model.graph)
    return replace(
        graph,
        serialised=model.SerializeToString(),
        cache=tuple(map(_halved, graph.cache)),
        inputs=frozenset(value.name for value in model.graph.input),
        is_half=True,
    )


def notes(exported: Graph, found: Graph) -> tuple[str, ...]:
    """What the user should know of a graph that was `exported`, and `found` when it was adapted."""
    told = []
    if found.is_half and not exported.is_half:
        told.append("attention is computed in float16 on this device, and cached keys and values are at most 16 bits")
    if exported.has_bias and not found.has_bias:
        told.append("attention on this device takes no bias: no trees, and a pass of its own for each answer")
    return tuple(told)


def without_kernels(serialised: bytes) -> tuple[str, ...]:
    """Operators of a graph that are not known to run on CUDA, by name."""
    from onnx import ModelProto

    found = {node.op_type for node in ModelProto.FromString(serialised).graph.node}
    return tuple(sorted(found - WITH_KERNELS))


def _see_all_before(node: Any) -> None:
    """Without a bias, and with the positions that follow from the lengths, which every version computes itself."""
    inputs = ["" if place in (_POSITIONS, _BIAS) else name for place, name in enumerate(node.input)]
    while not inputs[-1]:
        inputs.pop()
    node.input[:] = inputs


def _declare(graph: Any, cached: set[str]) -> None:
    """Make the inputs and outputs `cached` float16 that are float32; an int8 cache stays one."""
    for value in (*graph.input, *graph.output):
        kind = value.type.tensor_type
        if value.name in cached and kind.elem_type == FLOAT:
            kind.elem_type = FLOAT16


def _cast(graph: Any) -> None:
    """Cast what attention reads to float16, and its result to float32. Casts of tables are done when a session is made.

    The result keeps its name, at which a graph may be cut.
    """
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

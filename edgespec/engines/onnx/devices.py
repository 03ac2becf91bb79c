"""What a device other than the CPU needs of a graph, and how many rows at once it computes correctly, found by trial.

When a device is wrong it reports no error. Seen with ONNX Runtime's WebGPU (plugin 0.4.0, on a software device): passes
of 32 rows and more gave wrong logits.

On CUDA GroupQueryAttention has kernels for float16 and bfloat16 only, so in a float32 graph its inputs are cast to
float16 and its result back; everything else stays as it was exported. The cache then holds float16.
Kernels by type: onnxruntime/docs/OperatorKernels.md, of 1.2x; contrib_ops/cuda/bert/group_query_attention.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.engines.onnx.graph import ATTENTION, FLOAT16, CacheEntry, Graph
from edgespec.engines.onnx.head import FLOAT
from edgespec.engines.onnx.library import device_identity, version
from edgespec.engines.onnx.passes import Passes, PassRows
from edgespec.errors import CapabilityError
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.types import Logits, TokenIds

METHOD = 2  # increase it when more is tried
NARROW = 8  # rows of the passes that wider ones are compared with
TOLERANCE = 0.02  # in standard deviations of the logits
WIDTHS = (16, 31, 64, 128, 256, 512)
HALF_ONLY = frozenset({"cuda"})
LARGEST_HEAD, HEAD_STEP = 256, 8
_ACTIVATIONS, _TABLES = (0, 1, 2), (7, 8)  # query, key and value, or all in the first; cosines and sines


def widest_correct(passes: Passes, files: Sequence[Path], provider: str, vocabulary: int, rows: int) -> int:
    """Most rows of a pass, up to `rows`, that gives the logits of narrow ones. Uses cache 0.

    Tried once per model, device and version. Raises CapabilityError where not even narrow passes agree.
    """
    if passes.capacity < 4 * NARROW:  # too small a context to try anything in
        return min(rows, NARROW)
    measured = (provider, version(), device_identity(provider), rows, type(passes).__name__)
    key = key_of("device", METHOD, measured, *map(file_key, files))
    known: int | None = disk_cache.get("devices", key, int)
    if known is None or known < 1:
        known = _Trial(passes, vocabulary, rows).widest()
        disk_cache.put("devices", key, known)
    return known


class _Trial:
    def __init__(self, passes: Passes, vocabulary: int, rows: int) -> None:
        self._passes = passes
        self._ids = np.random.default_rng(0).integers(0, vocabulary, max(rows, 4 * NARROW)).astype(np.int32)
        self._rows = rows

    def widest(self) -> int:
        if not _agree(self._one_by_one(2 * NARROW), self._narrow(0, 2 * NARROW)):
            raise CapabilityError(
                "this device gives wrong results for this model: use --provider cpu, or another export"
            )
        sound = NARROW
        for width in sorted({width for width in (*WIDTHS, self._rows) if NARROW < width <= self._rows}):
            wanted = self._narrow(sound - sound % NARROW, width)  # cells before that are right
            if not _agree(self._last(0, self._ids[:width]), wanted):
                break  # no wider one is worth a try
            sound = width
        return min(sound, self._rows)

    def _narrow(self, start: int, end: int) -> Logits:
        """Logits of the last token before `end`, by narrow passes from `start` on."""
        parts = [(base, self._ids[base : min(base + NARROW, end)]) for base in range(start, end, NARROW)]
        return [self._last(base, part) for base, part in parts][-1]

    def _last(self, base: int, ids: TokenIds) -> Logits:
        scored: Logits = self._passes.run(0, PassRows(base, ids, np.array([ids.size - 1])))[0].copy()
        return scored

    def _one_by_one(self, count: int) -> Logits:
        return [self._last(at, self._ids[at : at + 1]) for at in range(count)][-1]


def _agree(found: Logits, wanted: Logits) -> bool:
    return bool(np.abs(found - wanted).max() <= TOLERANCE * wanted.std())


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

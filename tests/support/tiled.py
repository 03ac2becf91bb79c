"""Random weights of every GGML type as a GGUF has them, and sessions of graphs of the kernels' operators."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from edgespec.kernels import interface
from edgespec.kernels.library import library_path

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

#: Where a block has its half-precision scales.
SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "MXFP4": (),  # a power of two
}
FLOATS = {"F32": np.float32, "F16": np.float16}
SMALL_BLOCKS = [kind for kind in SCALES if GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 32]


def activation_block(kind: str) -> int:
    """Inputs of a row of activations that share a scale; 1: activations are not quantised."""
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])


def block_bytes(kind: str) -> int:
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])


def random_rows(kind: str, outputs: int, inputs: int, rng: np.random.Generator) -> Bytes:
    """Rows [outputs, bytes] with any codes and small scales, of both signs."""
    if kind not in SCALES:
        weights = rng.standard_normal((outputs, inputs)).astype(np.float32)
        made: Bytes = quantize(weights, GGMLQuantizationType[kind]).view(np.uint8).reshape(outputs, -1)
        return made
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows = rng.integers(0, 256, (outputs, inputs // block, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = rng.uniform(-4e-3, 4e-3, rows.shape[:2]).astype(np.float16)
        rows[..., at : at + 2] = scales[..., None].view(np.uint8)
    if kind == "MXFP4":
        rows[..., 0] = rng.integers(110, 120, rows.shape[:2])
    return rows.reshape(outputs, -1)


def dequantised(kind: str, rows: Bytes) -> Floats:
    data = rows.view(FLOATS[kind]) if kind in FLOATS else rows
    found: Floats = dequantize(data, GGMLQuantizationType[kind]).astype(np.float32)
    return found


def packed(kind: str, rows: Bytes, inputs: int) -> Bytes:
    size = interface.packed_bytes(kind, len(rows), inputs)
    assert size is not None
    out = np.empty(size, np.uint8)
    assert interface.pack(kind, rows, inputs, out)
    return out


def bits(values: Floats) -> NDArray[np.uint32]:
    return values.view(np.uint32)


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], /, **attributes: float | list[int]) -> NodeProto:
    made = helper.make_node(kind, inputs, outputs, domain="edgespec")
    for name, value in attributes.items():
        # An empty list has no type of its own.
        made.attribute.append(
            helper.make_attribute(name, value, attr_type=None if value or value == 0 else AttributeProto.INTS)
        )
    return made


def session(
    nodes: Sequence[NodeProto],
    inputs: Mapping[Any, int],
    outputs: Sequence[str],
    weights: Mapping[str, NDArray[np.uint8 | np.float32]],
    threads: int = 1,
) -> onnxruntime.InferenceSession:
    """A session of a graph; `inputs`: each one's element type."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(str(library_path()))
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    versions = [helper.make_opsetid("", 18), helper.make_opsetid("edgespec", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=9).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


Rows = list[tuple[int, int, int, int]]


def chain(slot: int, start: int, stop: int, first: int = 0) -> Rows:
    """Rows (slot, position, cell, parent) of a text, which are from number `first` on in their pass."""
    return [(slot, at, at, first + at - start - 1 if at > start else -1) for at in range(start, stop)]


def shared_passes(slots: int, length: int) -> Iterator[tuple[list[tuple[int, int, int]], Rows]]:
    """Passes that bring all texts to `length`: parts (slot, start, stop) in any order, and their rows."""
    rng, ends = np.random.default_rng(5), [0] * slots
    while any(end < length for end in ends):
        parts, rows = [], Rows()
        for slot in rng.permutation(slots).tolist():
            stop = min(ends[slot] + int(rng.choice([0, 1, 1, 4, 50])), length)
            rows += chain(slot, ends[slot], stop, len(rows))
            parts.append((slot, ends[slot], stop))
            ends[slot] = stop
        yield parts, rows


def tree(rng: np.random.Generator, base: int, count: int) -> tuple[Rows, list[list[int]]]:
    """A random tree behind `base` tokens of the first text: its rows, and the path to each."""
    parents = [-1, *(int(rng.integers(-1, i)) for i in range(1, count))]
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    return [(0, base + len(paths[i]) - 1, base + i, parents[i]) for i in range(count)], paths


def choose_path(name: str) -> bool:
    """Have later products use that instruction set; False if this processor lacks it. Results are equal."""
    return bool(interface.kernels().edgespec_choose_path(name.encode()) == 0)


def lookup(kind: str, tile: Bytes, outputs: int, inputs: int, ids: NDArray[np.int64]) -> Floats:
    """Dequantised rows [len(ids), inputs]. Raises IndexError for an id outside the matrix."""
    out = np.empty((len(ids), inputs), np.float32)
    given = interface.TYPES[kind], tile.ctypes.data, outputs, inputs, ids.ctypes.data, len(ids), out.ctypes.data
    if interface.kernels().edgespec_lookup(*given):
        raise IndexError(f"an id is outside 0..{outputs - 1}")
    return out


def product(kind: str, tile: Bytes, outputs: int, x: Floats, bias: Floats | None = None) -> Floats:
    """x [m, inputs] times a matrix [outputs, inputs] as tiles, plus `bias` [outputs]: [m, outputs], in this thread."""
    (rows, inputs), library, kind_number = x.shape, interface.kernels(), interface.TYPES[kind]
    assert interface.packed_bytes(kind, outputs, inputs) == tile.nbytes and x.flags.c_contiguous
    y = np.empty((rows, outputs), np.float32)
    scratch = np.empty(library.edgespec_scratch_bytes(kind_number, inputs, rows) + 64, np.uint8)
    status = library.edgespec_product(
        *(kind_number, tile.ctypes.data, outputs, inputs, x.ctypes.data, rows, y.ctypes.data),
        *(None if bias is None else bias.ctypes.data, scratch.ctypes.data + 63 & ~63, 0, -(-outputs // 16)),
    )
    assert status == 0
    return y

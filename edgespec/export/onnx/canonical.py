"""Rewrites a graph traced by transformers into the form of the model builder's graphs.

A traced graph takes the past length from the shape of its cache, which is wrong for a preallocated cache, and masks by
an attention bias. After rewriting, GroupQueryAttention takes the length from the attention mask, as in the builder's
graphs, and sliding windows are an attribute. The weights must be in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgespec.engines.onnx.head import attribute, producers
from edgespec.engines.onnx.partition import extract
from edgespec.errors import ModelFileError

Evaluate = Callable[[onnx.ModelProto], Sequence[NDArray[np.float32]]]
# transformers 5.24 writes no "input." and calls what a pass returns "cache".
_CACHE = re.compile(r"(?:(?:input\.|output\.)?past_key_values|cache)\.layers\.(\d+)\.(keys|values)")
_PAST_LAYER = re.compile(r"past_key_values\.(\d+)\.key")
LENGTHS, TOTAL = "seqlens_k", "total_sequence_length"


def canonicalise(model: onnx.ModelProto, windows: Sequence[int], evaluate: Evaluate) -> None:
    """Rewrite `model` in place. `windows`: sliding window of each layer, or -1.

    `evaluate` runs a part of the graph on all positions of the context, for rotary tables. Raises ModelFileError if the
    exporter did not fuse all attention layers, or the graph uses the cache's shape elsewhere.
    """
    _rename_cache(model.graph)
    attention = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    if len(attention) != len(windows):
        raise ModelFileError(f"{len(attention)} of {len(windows)} attention layers could be fused")
    _fix_rotary_tables(model, attention, evaluate)
    _count_mask(model.graph)
    for node in attention:
        inputs = [*node.input, *[""] * (11 - len(node.input))]
        layer = _PAST_LAYER.fullmatch(inputs[3])
        assert layer is not None
        inputs[5], inputs[6], inputs[9], inputs[10] = LENGTHS, TOTAL, "", ""
        node.input[:] = inputs
        node.attribute.append(onnx.helper.make_attribute("local_window_size", windows[int(layer[1])]))
    _bypass_row_guards(model.graph)
    _flat_products_to_matmul(model.graph)
    _plain_head(model.graph)
    _drop_dead(model)
    for node in model.graph.node:
        if node.op_type == "Shape" and node.input[0].startswith("past_key_values."):
            raise ModelFileError("the traced graph depends on the shape of its cache outside of attention")


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(value, value) for value in node.input]
        node.output[:] = [names.get(value, value) for value in node.output]
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)


def _rename_cache(graph: onnx.GraphProto) -> None:
    names = {}
    for start, values in (("past_key_values", graph.input), ("present", graph.output)):
        for value in values:
            if match := _CACHE.fullmatch(value.name):
                names[value.name] = f"{start}.{match[1]}.{match[2].removesuffix('s')}"
                _plain_cache_shape(value, start == "past_key_values")
    _rename(graph, names)


def _plain_cache_shape(value: onnx.ValueInfoProto, is_past: bool) -> None:
    """Set the shape [batch, heads, length, head size]; the exporter writes fixed sizes as strings."""
    dims = value.type.tensor_type.shape.dim
    heads, size = (int(dims[axis].dim_param or dims[axis].dim_value) for axis in (1, 3))
    length = "past_sequence_length" if is_past else "total_sequence_length"
    kind = value.type.tensor_type.elem_type
    plain = onnx.helper.make_tensor_value_info(value.name, kind, ["batch_size", heads, length, size])
    value.CopyFrom(plain)


def _fix_rotary_tables(model: onnx.ModelProto, attention: Sequence[onnx.NodeProto], evaluate: Evaluate) -> None:
    """Replace cosines and sines that are computed in every pass by tables [positions, head size / 2]."""
    weights = {tensor.name for tensor in model.graph.initializer}
    names = list(dict.fromkeys(n for node in attention for n in node.input[7:9] if n and n not in weights))
    if not names:
        return
    outputs = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in names]
    tables = dict(zip(names, evaluate(extract(model, "rotary tables", model.graph.input, outputs)), strict=True))
    for name, table in tables.items():
        model.graph.initializer.append(numpy_helper.from_array(table.astype(np.float32), f"rotary.{name}"))
    for node in attention:
        node.input[:] = [f"rotary.{value}" if value in tables else value for value in node.input]


def _count_mask(graph: onnx.GraphProto) -> None:
    """`seqlens_k` [batch], ones of each mask row less one, and `total_sequence_length`, a number; both int32."""
    make, one, scalar = onnx.helper.make_node, "/mask/one", "/mask/second_axis"
    graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), one))
    graph.initializer.append(numpy_helper.from_array(np.array(1, np.int64), scalar))
    nodes = [
        make("ReduceSum", ["attention_mask", one], ["/mask/ones"], keepdims=0),
        make("Sub", ["/mask/ones", one], ["/mask/last"]),
        make("Cast", ["/mask/last"], [LENGTHS], to=onnx.TensorProto.INT32),
        make("Shape", ["attention_mask"], ["/mask/shape"]),
        make("Gather", ["/mask/shape", scalar], ["/mask/length"]),
        make("Cast", ["/mask/length"], [TOTAL], to=onnx.TensorProto.INT32),
    ]
    for place, node in enumerate(nodes):
        node.name = f"/mask/{node.op_type}_{place}"
        graph.node.insert(place, node)


def _bypass_row_guards(graph: onnx.GraphProto) -> None:
    """Remove the `Where` that zeroes rows without attended positions: with a causal mask there are none."""
    made = producers(graph)
    names = {}
    for node in graph.node:
        if node.op_type == "Where" and (inner := made.get(node.input[2])) is not None:
            source = made.get(inner.input[0]) if inner.op_type == "Reshape" else inner
            if source is not None and source.op_type == "GroupQueryAttention":
                names[node.output[0]] = node.input[2]
    for node in graph.node:
        node.input[:] = [names.get(value, value) for value in node.input]


def _flat_products_to_matmul(graph: onnx.GraphProto) -> None:
    """Replace Reshape, Gemm, Reshape by one MatMul over [batch, width, features], which can be quantised."""
    made = producers(graph)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for value in node.input:
            readers.setdefault(value, []).append(node)
    for gemm in [node for node in graph.node if node.op_type == "Gemm"]:
        before, after = made.get(gemm.input[0]), readers.get(gemm.output[0], [])
        if before is None or before.op_type != "Reshape" or len(after) != 1 or after[0].op_type != "Reshape":
            continue
        weight = _transposed(graph, gemm.input[1]) if attribute(gemm, "transB") else gemm.input[1]
        has_bias = len(gemm.input) > 2 and bool(gemm.input[2])
        rows = before.input[0]
        while rows in made and made[rows].op_type == "Reshape":
            rows = made[rows].input[0]
        product = f"{after[0].output[0]}.product" if has_bias else after[0].output[0]
        new = [onnx.helper.make_node("MatMul", [rows, weight], [product], name=f"{gemm.name}/MatMul")]
        if has_bias:
            added = [product, gemm.input[2]]
            new.append(onnx.helper.make_node("Add", added, [after[0].output[0]], name=f"{gemm.name}/Add"))
        place = list(graph.node).index(after[0])
        graph.node.remove(after[0])
        for offset, node in enumerate(new):
            graph.node.insert(place + offset, node)
        made[after[0].output[0]] = new[-1]


def _transposed(graph: onnx.GraphProto, weight: str) -> str:
    """Transpose a weight [rows, columns] by an operator, which the runtime folds, so that it is stored once."""
    name = f"{weight}.transposed"
    if not any(name in node.output for node in graph.node):
        graph.node.insert(0, onnx.helper.make_node("Transpose", [weight], [name], name=f"/{name}", perm=[1, 0]))
    return name


def _plain_head(graph: onnx.GraphProto) -> None:
    """Make the output projection a MatMul and feed token ids directly into the embedding, as the engine expects."""
    names = {n.output[0]: "input_ids" for n in graph.node if n.op_type == "Reshape" and n.input[0] == "input_ids"}
    for node in list(graph.node):
        node.input[:] = [names.get(value, value) for value in node.input]
        if node.op_type == "FusedMatMul" and attribute(node, "transB") and not attribute(node, "transA"):
            rows, weight = node.input
            plain = onnx.helper.make_node("MatMul", [rows, weight], list(node.output), name=f"{node.name}/MatMul")
            plain.input[1] = _transposed(graph, weight)
            place = list(graph.node).index(node)
            graph.node.remove(node)
            graph.node.insert(place, plain)


def store_transposed(graph: onnx.GraphProto) -> None:
    """Store transposed weights instead of transposing by an operator: quantisation needs stored weights."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in [n for n in graph.node if n.op_type == "Transpose" and n.input[0] in weights]:
        turned = np.ascontiguousarray(numpy_helper.to_array(weights[node.input[0]]).T)
        graph.initializer.append(numpy_helper.from_array(turned, node.output[0]))
        graph.node.remove(node)


def _drop_dead(model: onnx.ModelProto) -> None:
    """Remove nodes, weights and inputs that no output depends on."""
    part = extract(model, model.graph.name, model.graph.input, model.graph.output)
    model.graph.CopyFrom(part.graph)

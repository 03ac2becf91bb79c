"""Rewrites an exported graph for speculative decoding, in place; weights stay in their file, untouched.

A graph of onnxruntime-genai's builder computes the lengths for GroupQueryAttention from an attention mask. After the
rewrite the operator gets them from inputs of the graph, and also explicit positions and an attention bias, so that the
rows of a tree can attend to their own ancestors only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.onnx.head import FLOAT, LOGITS, attribute
from edgespec.formats.onnx.graph import read_tensor

ATTENTION = "GroupQueryAttention"
NUM_ATTENTION_INPUTS = 11
# Inputs of our own; an exported graph may use the plain names inside.
LENGTHS, TOTAL, BIAS = "edgespec.lengths", "edgespec.total", "edgespec.bias"
SEEN = "edgespec.seen"  # cells that a pass reads, where the bias has a column for every cell
POSITIONS = "position_ids"
FLOAT16 = 10
CacheScales = Mapping[str, NDArray[np.float32]]


def rewrite_attention(graph: Any, attention: list[Any], is_half: bool) -> None:
    """Feed lengths, positions and bias to every attention operator from inputs of the graph."""
    from onnx import TensorProto, helper

    bias = BIAS
    if is_half:
        bias = f"{BIAS}.float16"
        graph.node.insert(0, helper.make_node("Cast", [BIAS], [bias], to=FLOAT16, name=bias))
    for node in attention:
        inputs = [*node.input, *[""] * (NUM_ATTENTION_INPUTS - len(node.input))]
        inputs[5], inputs[6], inputs[10] = LENGTHS, TOTAL, bias
        if attribute(node, "do_rotary", 0):
            inputs[9] = POSITIONS
        del node.input[:]
        node.input.extend(inputs)
    known = {value.name for value in graph.input}
    wanted: list[tuple[str, int, list[Any]]] = [
        (LENGTHS, TensorProto.INT32, ["batch_size"]),
        (TOTAL, TensorProto.INT32, []),
        (POSITIONS, TensorProto.INT64, ["batch_size", "sequence_length"]),
        (BIAS, TensorProto.FLOAT, [1, 1, "sequence_length", "all_length"]),
    ]
    graph.input.extend(helper.make_tensor_value_info(*entry) for entry in wanted if entry[0] not in known)


def slice_bias(graph: Any) -> None:
    """Take a bias with a column for every cell, and of it the first `SEEN` ones.

    Its shape then is the same in all passes of a width. Another shape has to be bound for each pass, which looks up
    every operator that reads the bias: .14 ms behind a pass of 8 ms, for which the code is no longer in the caches.
    """
    from onnx import TensorProto, helper, numpy_helper

    cut, begin, axis = f"{BIAS}.seen", f"{BIAS}.begin", f"{BIAS}.axis"
    for node in graph.node:
        node.input[:] = [cut if name == BIAS else name for name in node.input]
    graph.node.insert(0, helper.make_node("Slice", [BIAS, begin, SEEN, axis], [cut], name=cut))
    values = ((begin, 0), (axis, 3))
    graph.initializer.extend(numpy_helper.from_array(np.array([value], np.int64), name) for name, value in values)
    graph.input.append(helper.make_tensor_value_info(SEEN, TensorProto.INT64, [1]))


def quantise_cache(graph: Any, attention: list[Any], scales: CacheScales) -> None:
    """Make every attention operator store keys and values as int8, with a scale per channel."""
    from onnx import TensorProto, helper, numpy_helper

    for node in attention:
        inputs = [*node.input, *[""] * (NUM_ATTENTION_INPUTS + 3 - len(node.input))]
        for place, past, kind in ((12, node.input[3], "k"), (13, node.input[4], "v")):
            heads, size = scales[past].shape
            inputs[place] = f"{past}.scale"
            tensor = scales[past].astype(np.float32).reshape(1, heads, 1, size)
            graph.initializer.append(numpy_helper.from_array(tensor, inputs[place]))
            node.attribute.append(helper.make_attribute(f"{kind}_quant_type", "PER_CHANNEL"))
        node.attribute.append(helper.make_attribute("kv_cache_bit_width", 8))
        del node.input[:]
        node.input.extend(inputs)
    names = {node.input[i] for node in attention for i in (3, 4)} | {
        node.output[i] for node in attention for i in (1, 2)
    }
    for value in (*graph.input, *graph.output):
        if value.name in names:
            value.type.tensor_type.elem_type = TensorProto.INT8


def widen_logits(graph: Any) -> None:
    """Give logits of half precision as float32."""
    from onnx import helper

    value = next(value for value in graph.output if value.name == LOGITS)
    if value.type.tensor_type.elem_type != FLOAT16:
        return
    narrow = f"{LOGITS}.float16"
    for node in graph.node:
        node.output[:] = [narrow if name == LOGITS else name for name in node.output]
    graph.node.append(helper.make_node("Cast", [narrow], [LOGITS], to=FLOAT, name="widen_logits"))
    value.type.tensor_type.elem_type = FLOAT


def drop_dead(graph: Any) -> None:
    """Remove what is no longer used: the operators that counted the attention mask, and the mask."""
    while True:
        used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
        dead = [node for node in graph.node if not any(name in used for name in node.output if name)]
        if not dead:
            break
        for node in dead:
            graph.node.remove(node)
    inputs = [value for value in graph.input if value.name in used]
    del graph.input[:]
    graph.input.extend(inputs)


def lengthen_rotary(graph: Any, attention: list[Any], path: Path, cells: int) -> None:
    """Repeat the last row of the rotary tables: the operator requires one per cell, although positions end earlier."""
    from onnx import numpy_helper

    tables = {name for node in attention for name in node.input[7:9] if name}
    for tensor in graph.initializer:
        if tensor.name in tables:
            rows = read_tensor(tensor, path.parent)
            longer = np.concatenate((rows, np.repeat(rows[-1:], cells - len(rows), axis=0)))
            tensor.CopyFrom(numpy_helper.from_array(longer, tensor.name))

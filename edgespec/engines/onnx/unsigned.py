"""Signed int8 weights as unsigned ones, for processors that add up signed products wrongly (`products_saturate`).

ONNX Runtime does this itself under `session.x64quantprecision`, byte by byte: of the 15 s that a session of a model of
1.2 billion weights took, 13. Here it is one pass over each matrix, at the speed of memory. A weight w becomes w + 128
and its zero point 128 more, so that the products are the same integers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.formats.onnx import WHOLE_PRODUCT
from edgespec.formats.onnx.tensors import read_tensor

# Inputs of the product: codes, weights, scale of codes, scales of weights, zero point of codes, that of the weights.
_WEIGHTS, _ZERO_POINT = 1, 5
_INT8, _UINT8 = 3, 2
_MIDDLE = "edgespec.middle"
# Operators that read int8 one by one.
_READ_EXACTLY = frozenset({"DequantizeLinear", "Gather", "GatherBlockQuantized", "Cast", "MatMulNBits"})
Weights = dict[str, NDArray[np.uint8]]


def make_unsigned(serialised: bytes, folder: Path) -> tuple[bytes, Weights, bool]:
    """The graph with unsigned weights, these by name, and whether signed ones are left for ONNX Runtime.

    The weights are to be given to the session in place of those in the file.

    Left as they are: weights with a zero point of their own, or that other operators read too.
    Raises ModelFileError when the weights cannot be read.
    """
    import onnx

    model = onnx.ModelProto.FromString(serialised)
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == WHOLE_PRODUCT]
    wanted = {node.input[_WEIGHTS] for node in products if not any(node.input[_ZERO_POINT:])}
    others = {name for node in graph.node for name in _read_otherwise(node)}
    found: Weights = {}
    for name in wanted - others:
        if name in tensors and tensors[name].data_type == _INT8:
            found[name] = _shifted(tensors[name], folder)
            tensors[name].data_type = _UINT8
    for node in products:
        if node.input[_WEIGHTS] in found:
            node.input[:] = [*node.input, *[""] * (_ZERO_POINT - len(node.input)), _MIDDLE][: _ZERO_POINT + 1]
    if found:
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(128, np.uint8), _MIDDLE))
    signed = {tensor.name for tensor in graph.initializer if tensor.data_type == _INT8}
    is_left = any(signed & set(node.input) for node in graph.node if node.op_type not in _READ_EXACTLY)
    return model.SerializeToString(), found, is_left


def _read_otherwise(node: Any) -> list[str]:
    """What a node reads as anything but the weights of a product without a zero point of theirs."""
    if node.op_type != WHOLE_PRODUCT or any(node.input[_ZERO_POINT:]):
        return list(node.input)
    return [name for place, name in enumerate(node.input) if place != _WEIGHTS]


def _shifted(tensor: Any, folder: Path) -> NDArray[np.uint8]:
    found = read_tensor(tensor, folder).view(np.uint8)
    codes = found if found.flags.writeable else found.copy()
    np.bitwise_xor(codes, 128, out=codes)
    return codes

"""Turns signed int8 weights into unsigned ones, for processors on which signed products saturate.

ONNX Runtime can do this itself (`session.x64quantprecision`), byte by byte: for 1.2 billion weights that took 13 of the
15 s of loading. Here it is one pass over each matrix. A weight w becomes w + 128 and its zero point 128, so that the
products are the same integers.

A session packs these weights when it is made and then reads the packed copy only (`reads_packed_weights` checks this),
so that the unsigned ones can be freed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.onnx.pages import untouched_zeros
from edgespec.formats.onnx import WHOLE_PRODUCT
from edgespec.formats.onnx.graph import read_tensor
from edgespec.platform.machine import usable_processors

# Inputs of the product: codes, weights, scale of codes, scales of weights, zero point of codes, that of the weights.
_WEIGHTS, _ZERO_POINT = 1, 5
_INT8, _UINT8 = 3, 2
_MIDDLE = "edgespec.middle"
_MOST_THREADS = 4  # memory is not faster for more
# Operators that read int8 one by one.
_READ_EXACTLY = frozenset({"DequantizeLinear", "Gather", "GatherBlockQuantized", "Cast", "MatMulNBits"})
Weights = dict[str, NDArray[np.uint8]]


def make_unsigned(serialised: bytes, folder: Path) -> tuple[bytes, Weights, bool]:
    """The graph with unsigned weights, these by name, and whether it still has signed ones.

    The session must be given these weights in place of those in the file. Weights with a zero point of their own, or
    that other operators read too, stay signed. Raises ModelFileError when the weights cannot be read.
    """
    import onnx

    model = onnx.ModelProto.FromString(serialised)
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == WHOLE_PRODUCT]
    wanted = {node.input[_WEIGHTS] for node in products if not any(node.input[_ZERO_POINT:])}
    others = {name for node in graph.node for name in _read_otherwise(node)}
    changed = [tensors[n] for n in sorted(wanted - others) if n in tensors and tensors[n].data_type == _INT8]
    with ThreadPoolExecutor(min(usable_processors(), _MOST_THREADS)) as threads:
        shifted = threads.map(lambda tensor: _shifted(tensor, folder), changed)
        found = {tensor.name: codes for tensor, codes in zip(changed, shifted, strict=True)}
    for tensor in changed:
        tensor.data_type = _UINT8
    for node in products:
        if node.input[_WEIGHTS] in found:
            node.input[:] = [*node.input, *[""] * (_ZERO_POINT - len(node.input)), _MIDDLE][: _ZERO_POINT + 1]
    if found:
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(128, np.uint8), _MIDDLE))
    signed = {tensor.name for tensor in graph.initializer if tensor.data_type == _INT8}
    is_left = any(signed & set(node.input) for node in graph.node if node.op_type not in _READ_EXACTLY)
    return model.SerializeToString(), found, is_left


def _read_otherwise(node: Any) -> list[str]:
    """Inputs of a node, except the weights of a product without a zero point for them."""
    if node.op_type != WHOLE_PRODUCT or any(node.input[_ZERO_POINT:]):
        return list(node.input)
    return [name for place, name in enumerate(node.input) if place != _WEIGHTS]


def _shifted(tensor: Any, folder: Path) -> NDArray[np.uint8]:
    """The unsigned weights, in memory pages of their own, which go back to the system as soon as they are freed."""
    signed = read_tensor(tensor, folder, mapped=True).view(np.uint8)
    codes = untouched_zeros(signed.shape, np.uint8)
    np.bitwise_xor(signed, 128, out=codes)
    return codes

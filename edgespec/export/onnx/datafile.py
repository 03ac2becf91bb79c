"""Reads the weights of a float32 graph from its memory-mapped data file, and copies them to another one."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.errors import ModelFileError
from edgespec.formats.onnx import DATA
from edgespec.formats.onnx.graph import DataWriter


class Stored:
    """The initialisers of `graph` by name; its data file is in `folder`."""

    def __init__(self, graph: onnx.GraphProto, folder: Path) -> None:
        self._graph, self._folder = graph, folder
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._turned = {
            node.output[0]: node
            for node in graph.node
            if node.op_type == "Transpose" and node.input[0] in self._tensors and _turns(node)
        }
        path = folder / DATA
        self._bytes: Any = b""
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Unmap the file, which Windows cannot replace while mapped. No matrix may be in use any more."""
        if isinstance(self._bytes, mmap.mmap) and error[0] is None:
            self._bytes.close()

    def matrix(self, name: str) -> NDArray[np.float32] | None:
        """Stored float32 weights [rows, columns], transposed if an operator does so; None for other values."""
        turned = name in self._turned
        tensor = self._tensors.get(self._turned[name].input[0] if turned else name)
        if tensor is None or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2:
            return None
        if tensor.data_location == TensorProto.EXTERNAL:
            rows = np.frombuffer(self._external(tensor), np.float32).reshape(tensor.dims)
        else:
            rows = numpy_helper.to_array(tensor)
        found: NDArray[np.float32] = rows.T if turned else rows
        return found

    def moved(self, tensor: onnx.TensorProto, data: DataWriter) -> onnx.TensorProto:
        """A copy of `tensor` whose external data, if any, is written to `data`."""
        copy = onnx.TensorProto()
        copy.CopyFrom(tensor)
        if tensor.data_location == TensorProto.EXTERNAL:
            data.place(copy, self._external(tensor))
        return copy

    def drop_unused_transposes(self) -> None:
        read = {name for node in self._graph.node for name in node.input}
        for name, node in self._turned.items():
            if name not in read:
                self._graph.node.remove(node)

    def _external(self, tensor: onnx.TensorProto) -> memoryview:
        place = {entry.key: entry.value for entry in tensor.external_data}
        start = int(place.get("offset", 0))
        length = int(place.get("length", 0)) or _size(tensor)
        if place.get("location") != DATA or start + length > len(self._bytes):
            raise ModelFileError(
                f"tensor {tensor.name} is not in {self._folder / DATA}: the file ends before it or is another file"
            )
        return memoryview(self._bytes)[start : start + length]


def _turns(node: onnx.NodeProto) -> bool:
    order = next((list(item.ints) for item in node.attribute if item.name == "perm"), [1, 0])
    return order == [1, 0]


def _size(tensor: onnx.TensorProto) -> int:
    return int(np.prod(tensor.dims)) * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)

"""The operators and weights of a graph that is being written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgespec.formats.onnx import MICROSOFT
from edgespec.formats.onnx.tensors import DataWriter, Fill, MemoryWriter
from edgespec.formats.onnx.w8a8 import CONSTANTS

OPERATOR_SET, FILE_VERSION = 22, 10
Values = Sequence[onnx.ValueInfoProto]


class Nodes:
    """`operators` in the order of the computation; weights go to `data` as they come."""

    def __init__(self, data: DataWriter | MemoryWriter) -> None:
        self.operators: list[onnx.NodeProto] = []
        self._tensors: dict[str, onnx.TensorProto] = {}
        self._data = data

    def add(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], name: str, **attributes: Any) -> None:
        """Append one operator; `domain` among the `attributes` for those that are not ONNX's own."""
        self.operators.append(helper.make_node(kind, inputs, outputs, name, **attributes))

    def store(self, name: str, values: NDArray[Any]) -> str:
        """Keep a weight under `name`, which is returned."""
        self._tensors[name] = self._data.add(name, values)
        return name

    def store_later(self, name: str, num_bytes: int, fill: Fill) -> str:
        """Keep bytes that `fill` makes under `name`, which is returned."""
        self._tensors[name] = self._data.add_later(name, num_bytes, fill)
        return name

    def view(self, name: str, of: str, shape: Sequence[int]) -> str:
        """A second weight over the bytes of `of`, with another shape."""
        tensor = onnx.TensorProto()
        tensor.CopyFrom(self._tensors[of])
        tensor.name = name
        tensor.dims[:] = shape
        self._tensors[name] = tensor
        return name

    def has(self, name: str) -> bool:
        return name in self._tensors

    def model(self, inputs: Values, outputs: Values, properties: Mapping[str, str]) -> onnx.ModelProto:
        read = {name for node in self.operators for name in node.input}
        constants = [numpy_helper.from_array(value, name) for name, value in CONSTANTS.items() if name in read]
        graph = helper.make_graph(self.operators, "main_graph", inputs, outputs, [*self._tensors.values(), *constants])
        domains = {MICROSOFT, *(node.domain for node in self.operators if node.domain)}
        sets = [helper.make_opsetid("", OPERATOR_SET), *(helper.make_opsetid(name, 1) for name in sorted(domains))]
        made = helper.make_model(graph, opset_imports=sets, ir_version=FILE_VERSION, producer_name="edgespec")
        helper.set_model_props(made, dict(properties))
        return made

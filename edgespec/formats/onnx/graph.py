"""The operators and weights of a graph: written one after another, weights into a file beside it; read one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from edgespec.formats.onnx import MICROSOFT

ALIGNMENT = 4096  # so that ONNX Runtime can map a tensor
INLINE_BYTES = 1024  # what is smaller stays in the graph
IN_MEMORY = "(memory)"  # the location of weights that a session is given


def external_entry(tensor: Any) -> dict[str, str]:
    """Where a weight outside the graph lies: location, offset, length; empty for one inside."""
    return {item.key: item.value for item in tensor.external_data} if tensor.data_location == 1 else {}


Fill = Callable[[NDArray[np.uint8]], list[Callable[[], None]]]
"""Gives the calls that fill an array of bytes together, in any order and on any thread."""


class WeightWriter(ABC):
    """Describes the weights of a graph (TensorProto), and keeps those that are too large for it."""

    def add(self, name: str, values: NDArray[Any]) -> TensorProto:
        """The description of `values` [any shape]; small ones are in it."""
        if values.nbytes < INLINE_BYTES:
            return numpy_helper.from_array(values, name)
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        return self._keep(TensorProto(name=name, data_type=kind, dims=values.shape), np.ascontiguousarray(values))

    @abstractmethod
    def add_later(self, name: str, num_bytes: int, fill: Fill) -> TensorProto:
        """The description of bytes that `fill` makes."""

    @abstractmethod
    def _keep(self, tensor: TensorProto, values: NDArray[Any]) -> TensorProto:
        """Keep `values`, let `tensor` point at them and return it."""


class DataWriter(WeightWriter):
    """Appends tensors to `file`, which the graph knows as `location`."""

    def __init__(self, file: IO[bytes], location: str) -> None:
        self._file, self._location = file, location

    def add_later(self, name: str, num_bytes: int, fill: Fill) -> TensorProto:
        values = np.empty(num_bytes, np.uint8)
        for call in fill(values):
            call()
        return self.add(name, values)

    def _keep(self, tensor: TensorProto, values: NDArray[Any]) -> TensorProto:
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        point_at(tensor, self._location, self._file.tell(), values.nbytes)
        self._file.write(values.data.cast("B"))
        return tensor


class MemoryWriter(WeightWriter):
    """Keeps tensors for a session in this process: `arrays` by name, and `later` (size in bytes, fill) by name."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self.later: dict[str, tuple[int, Fill]] = {}

    def add_later(self, name: str, num_bytes: int, fill: Fill) -> TensorProto:
        """As described; made before the session is opened."""
        self.later[name] = num_bytes, fill
        return point_at(TensorProto(name=name, data_type=TensorProto.UINT8, dims=[num_bytes]), IN_MEMORY, 0, num_bytes)

    def _keep(self, tensor: TensorProto, values: NDArray[Any]) -> TensorProto:
        self.arrays[tensor.name] = values
        return point_at(tensor, IN_MEMORY, 0, values.nbytes)


def point_at(tensor: TensorProto, location: str, offset: int, length: int) -> TensorProto:
    """Let `tensor`, which is returned, be one whose bytes lie elsewhere."""
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": str(offset), "length": str(length)}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


OPERATOR_SET, FILE_VERSION = 22, 10
Ports = tuple[list[ValueInfoProto], list[ValueInfoProto]]  # inputs and outputs of a graph
TOKENS = ("batch_size", "sequence_length")  # a shape


def port(name: str, shape: Sequence[object] | None, kind: int = TensorProto.FLOAT) -> ValueInfoProto:
    """An input or output; `shape` of numbers and names."""
    return helper.make_tensor_value_info(name, kind, shape)


class Nodes:
    """`operators` in the order of the computation; weights go to `data` as they come."""

    def __init__(self, data: WeightWriter) -> None:
        self.operators: list[NodeProto] = []
        self._tensors: dict[str, TensorProto] = {}
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
        tensor = TensorProto()
        tensor.CopyFrom(self._tensors[of])
        tensor.name = name
        tensor.dims[:] = shape
        self._tensors[name] = tensor
        return name

    def has(self, name: str) -> bool:
        return name in self._tensors

    def model(self, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]) -> ModelProto:
        graph = helper.make_graph(self.operators, "main_graph", inputs, outputs, [*self._tensors.values()])
        domains = {MICROSOFT, *(node.domain for node in self.operators if node.domain)}
        sets = [helper.make_opsetid("", OPERATOR_SET), *(helper.make_opsetid(name, 1) for name in sorted(domains))]
        return helper.make_model(graph, opset_imports=sets, ir_version=FILE_VERSION, producer_name="edgespec")

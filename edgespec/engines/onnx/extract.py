"""The part of an ONNX graph that computes some of its values from others; weights stay where they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edgespec.errors import ModelFileError


def producers(graph: Any) -> dict[str, Any]:
    """The node that makes each value of a GraphProto."""
    return {output: node for node in graph.node for output in node.output if output}


def extract(model: Any, name: str, inputs: Iterable[Any], outputs: Iterable[Any]) -> Any:
    """The part of a ModelProto that computes `outputs` from `inputs`, both ValueInfoProto, as a ModelProto.

    Weights keep their places in the data file. Raises ModelFileError when `outputs` need something that is neither
    computed nor among `inputs`.
    """
    import onnx

    made = producers(model.graph)
    inputs, outputs = list(inputs), list(outputs)
    known = {value.name for value in inputs}
    weights = {tensor.name for tensor in model.graph.initializer}
    wanted, used = [value.name for value in outputs], set[str]()
    kept: set[int] = set()
    while wanted:
        value = wanted.pop()
        if not value or value in known or value in used:
            continue
        used.add(value)
        if value in weights:
            continue
        if value not in made:
            raise ModelFileError(f"{name} needs {value!r}, which the graph does not compute")
        kept.add(id(made[value]))
        wanted.extend(made[value].input)
    graph = onnx.GraphProto(name=name)
    graph.node.extend(node for node in model.graph.node if id(node) in kept)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in used)
    read = {value for node in graph.node for value in node.input}
    graph.input.extend(value for value in inputs if value.name in read)
    graph.output.extend(outputs)
    part = onnx.ModelProto(ir_version=model.ir_version, producer_name=model.producer_name, graph=graph)
    part.opset_import.extend(model.opset_import)
    return part

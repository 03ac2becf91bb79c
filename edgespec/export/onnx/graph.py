"""ONNX graphs as files: read without weights, walk, write whole or not at all.

Weights live in one external data file, `model.onnx.data`, and are never read here: a graph that is rewritten keeps
pointing at the same bytes. What this module does not know: which exporter made a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from edgespec.errors import CapabilityError, ModelFileError

try:
    import onnx
    from google.protobuf.message import DecodeError
except ImportError as error:
    raise CapabilityError("ONNX graphs need onnx: pip install 'edgespec[export]'") from error

MODEL = "model.onnx"
DATA = "model.onnx.data"


def read_graph(path: Path) -> onnx.ModelProto:
    """The graph of `path`, its weights left on disk. Raises ModelFileError for anything but an ONNX file."""
    try:
        model = onnx.load(path, load_external_data=False)
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing: export the model first: edgespec export") from error
    except (OSError, DecodeError) as error:
        raise ModelFileError(f"{path} is not an ONNX file: {error}") from error
    if not model.graph.node:
        raise ModelFileError(f"{path} holds no graph: it is truncated or another kind of file")
    return model


def write_graph(model: onnx.ModelProto, path: Path) -> Path:
    """Write the graph beside its data file; the name appears only when the file is whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(model.SerializeToString())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def producers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """The node that makes each value."""
    return {output: node for node in graph.node for output in node.output if output}


def attribute(node: onnx.NodeProto, name: str, default: int = 0) -> int:
    """An integer attribute of a node."""
    return next((item.i for item in node.attribute if item.name == name), default)


def extract(
    model: onnx.ModelProto, name: str, inputs: Iterable[onnx.ValueInfoProto], outputs: Iterable[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    """The part of a graph that computes `outputs` from `inputs`; weights keep their places in the data file.

    Raises ModelFileError when `outputs` need something that is neither computed nor among `inputs`.
    """
    made = producers(model.graph)
    outputs = list(outputs)
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

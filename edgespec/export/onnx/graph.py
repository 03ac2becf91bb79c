"""ONNX graphs as files: read without weights, walk, write whole or not at all.

Weights live in one external data file, `model.onnx.data`, and are never read here: a graph that is rewritten keeps
pointing at the same bytes. What this module does not know: which exporter made a graph.
"""

from __future__ import annotations

from pathlib import Path

from edgespec.engines.onnx.partition import extract, producers
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.files import write_atomically
from edgespec.formats.onnx import DATA, MODEL
from edgespec.installation import install_command

try:
    import onnx
    from google.protobuf.message import DecodeError
except ImportError as error:
    raise CapabilityError(f"ONNX graphs need onnx: {install_command()}") from error

__all__ = ["DATA", "MODEL", "attribute", "extract", "producers", "read_graph", "write_graph"]


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
    write_atomically(path, model.SerializeToString())
    return path


def attribute(node: onnx.NodeProto, name: str, default: int = 0) -> int:
    """An integer attribute of a node."""
    return next((item.i for item in node.attribute if item.name == name), default)

"""Reads and writes ONNX graph files, without their weights.

Weights are in one external data file, `model.onnx.data`, to which a rewritten graph still refers.
"""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.installation import IMPORT_FAILURES, not_importable
from edgespec.platform.files import write_atomically

try:
    import onnx
    from google.protobuf.message import DecodeError
except IMPORT_FAILURES as error:
    raise not_importable("an ONNX graph", error, "onnx") from error


def read_graph(path: Path) -> onnx.ModelProto:
    """Read the graph of `path` without its weights. Raises ModelFileError for anything but an ONNX file."""
    try:
        model = onnx.load(path, load_external_data=False)
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing: export the model first: edgespec export") from error
    except (OSError, DecodeError) as error:
        raise ModelFileError(f"{path} is not an ONNX file: {error}") from error
    if not model.graph.node:
        raise ModelFileError(f"{path} has no graph: it is truncated or not an ONNX file")
    return model


def write_graph(model: onnx.ModelProto, path: Path) -> Path:
    """Write the graph atomically; `path` must be beside its data file."""
    write_atomically(path, model.SerializeToString())
    return path

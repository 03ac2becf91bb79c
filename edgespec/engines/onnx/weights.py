"""The weights of an exported graph, inside it or in a file beside it: checks their offsets, and sums their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.formats.onnx.graph import IN_MEMORY, external_entry


def check_weight_files(graph: Any, path: Path) -> None:
    """Raise ModelFileError unless every external weight is inside its file, and that beside the graph."""
    sizes: dict[str, int] = {}
    for tensor in graph.initializer:
        entry = external_entry(tensor)
        if entry.get("location", IN_MEMORY) == IN_MEMORY:
            continue
        name = entry["location"]
        if Path(name).name != name:
            raise ModelFileError(f"{path} names a weight file outside its own folder: {name!r}. Export it again")
        if name not in sizes:
            file = path.parent / name
            if not file.is_file():
                raise ModelFileError(f"{path} needs {name!r} beside it, which is missing. Copy it there")
            sizes[name] = file.stat().st_size
        offset, length = (
            _whole(entry.get(key, "0"), f"{key} of {tensor.name!r}", path) for key in ("offset", "length")
        )
        end = offset + length
        if end > sizes[name]:
            raise ModelFileError(f"{path.parent / name} has {sizes[name]} bytes and needs {end}: it is truncated")


def _whole(text: str, what: str, path: Path) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ModelFileError(
            f"{path} is damaged: the {what} is {text[:40]!r}, a whole number is needed. Export it again"
        )
    return int(text)


def weight_bytes(graph: Any) -> int:
    return sum(map(tensor_bytes, graph.initializer))


def tensor_bytes(tensor: Any) -> int:
    """Bytes of one weight, in the graph or in a file beside it."""
    entry = external_entry(tensor)
    return int(entry.get("length", 0)) if entry else int(tensor.ByteSize())

"""Reads the header of a draft head in GGUF, and says what is wrong with it before llama.cpp sees the file."""

from __future__ import annotations

import struct
from abc import ABC
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.gguf.check import HeadKind, head_kind
from edgespec.formats.gguf.header import GgufHeader, GgufNumbers, GgufStrings, Scalar, TensorInfo, Value, read_header

HALF_BYTES = 2  # per cached number
EMBEDDINGS, OUTPUT, DRAFTED = "token_embd.weight", "output.weight", "d2t"


def head_kind_of(path: Path) -> HeadKind | None:
    """What head a file holds; None for a model or no GGUF. Raises ModelNotFound, ModelFileError for a damaged GGUF."""
    return head_kind(read_header(path)) if path.suffix == ".gguf" else None


def check_target(
    name: str,
    layers: tuple[int, ...],
    widths: tuple[int, int],
    sizes: tuple[int, int],
    num_layers: int,
) -> None:
    """Raise CapabilityError unless the head `name` reads `layers` that its target has.

    `widths`, `sizes`: hidden and vocabulary size, of what the head was made for and of the target.
    """
    fix = "give the head that was trained for it"
    if widths[0] != widths[1]:
        raise CapabilityError(f"head {name} reads a target of width {widths[0]}, this target has {widths[1]}: {fix}")
    if max(layers, default=0) >= num_layers:
        raise CapabilityError(
            f"head {name} reads layer {max(layers)} of its target, this one has 0..{num_layers - 1}: {fix}"
        )
    if sizes[0] != sizes[1]:
        raise CapabilityError(f"head {name} was made for {sizes[0]} tokens, this target has {sizes[1]}: {fix}")


class HeadReader(ABC):
    """A head's numbers and the shapes of its tensors, checked. `what` the file should be, for errors."""

    what: ClassVar[str]

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path, self._header = path, header
        self._tensors = {tensor.name: tensor for tensor in header.tensors}

    def _vocabulary_size(self) -> int:
        tokens = self._header.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, GgufStrings) else 0

    def _num_drafted(self, vocabulary_size: int) -> int:
        """How many tokens it can propose; what lists them is read, since a wrong id would end the process."""
        tensor = self._tensors.get(DRAFTED)
        if tensor is None:
            return vocabulary_size
        if tensor.kind != "I64" or len(tensor.shape) != 1:
            raise self._wrong(f"its {DRAFTED} is {tensor.kind} {tensor.shape}, a list of I64 is needed")
        if OUTPUT not in self._tensors:
            raise self._wrong(f"it has {DRAFTED} but no {OUTPUT} of that many tokens")
        ids = self._listed(tensor)
        if min(ids) < 0 or max(ids) >= vocabulary_size or len(set(ids)) < len(ids):
            raise self._wrong(f"its {DRAFTED} must name different tokens of 0..{vocabulary_size - 1}")
        return len(ids)

    def _listed(self, tensor: TensorInfo) -> tuple[int, ...]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._header.data_start + tensor.offset)
                data = file.read(8 * tensor.shape[0])
        except OSError as exc:
            raise ModelFileError(f"{self._path} cannot be read: {exc.strerror}") from exc
        return struct.unpack(f"<{len(data) // 8}q", data)

    def _head_size(self, width: int, heads: int) -> int:
        """Numbers of a key and of a value of one attention head."""
        size = self._count("attention.key_length", width // heads)
        if self._count("attention.value_length", width // heads) != size:
            raise self._wrong("keys and values of its heads differ in width")
        rotated = self._count("rope.dimension_count", size)
        if rotated > size or rotated % 2:
            raise self._wrong(f"it rotates {rotated} of {size} numbers of a head")
        return size

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]], *, may_lack: bool = False) -> None:
        """`shapes` in GGUF order, fastest dimension first."""
        for name, shape in shapes.items():
            found = self._tensors.get(name)
            if found is None and not may_lack:
                raise self._wrong(f"it lacks the tensor {name!r}")
            if found is not None and found.shape != shape:
                raise self._wrong(f"its tensor {name!r} has the shape {found.shape}, {shape} is needed")

    def _value(self, name: str) -> Value | None:
        return self._header.metadata.get(f"{self._header.architecture}.{name}")

    def _items(self, name: str) -> tuple[Scalar, ...]:
        found = self._value(name)
        return found.items if isinstance(found, GgufNumbers) else ()

    def _count(self, name: str, default: int = 0) -> int:
        """A number above 0; `default` where there is none."""
        found = self._value(name)
        value = default if found is None else found
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(f"its {name} is {found!r:.60}, a number above 0 is needed")
        return value

    def _wrong(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self._path} is not a usable {self.what}: {reason}. Download or export it again")

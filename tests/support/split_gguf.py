"""Splits a GGUF as llama.cpp's own tool does: NAME-00001-of-0000N.gguf, all metadata in the first file."""

from __future__ import annotations

from pathlib import Path

import gguf

from tiny_gguf import finish

_STRUCTURE = "GGUF."  # what the reader calls the counts of the file itself


def split(source: Path, stem: Path, tensors_per_file: int) -> list[Path]:
    """The files, in order; `stem` is their common path without number and suffix."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(f"{stem}.gguf", architecture, split_max_tensors=tensors_per_file)
    for key, field in reader.fields.items():
        if not key.startswith(_STRUCTURE) and key != "general.architecture":
            kind = field.types[0]
            item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, item)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer, stem, {})
    return sorted(stem.parent.glob(f"{stem.name}-*-of-*.gguf"))

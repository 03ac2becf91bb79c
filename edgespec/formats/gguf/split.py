"""Models in several GGUF files: a header with all metadata and no tensors, and shards that several headers may share.

llama.cpp reads such a model when it is told its files in order. The header names them under FILES, and all of them
carry the same ID, a digest of the model they were cut from: a shard of another model is never read in their place.
Models that llama.cpp's own tool split name no files: those of `NAME-00001-of-00003.gguf` follow from its name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from edgespec.errors import ModelFileError, ModelNotFound
from edgespec.formats.gguf.header import GgufHeader, read_header
from edgespec.formats.gguf.values import GgufStrings

FILES, ID = "edgespec.split.files", "edgespec.split.id"
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_SHARDS = 16
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Shard names by file, size and time of change: a header with a large vocabulary takes half a second to read.
_known: dict[tuple[Path, int, int], tuple[str, ...]] = {}


def model_files(path: Path) -> tuple[Path, ...]:
    """`path`, and after it the shards that its header names, in llama.cpp's order.

    Raises ModelNotFound, and ModelFileError for names that are no plain file names.
    """
    key = _key(path)
    if key not in _known:
        _known[key] = tuple(shard_names(path, read_header(path)))
    return (path, *(path.parent / name for name in _known[key]))


def is_early_exit(draft: Path, target: Path) -> bool:
    """Whether all shards of `draft` are the first ones of `target`. Raises as `model_files`."""
    ours, theirs = model_files(draft)[1:], model_files(target)[1:]
    return 0 < len(ours) < len(theirs) and theirs[: len(ours)] == ours


def _key(path: Path) -> tuple[Path, int, int]:
    try:
        found = path.stat()
    except OSError as exc:
        raise ModelNotFound(f"{path} does not exist; give the path of a GGUF file") from exc
    return path, found.st_size, found.st_mtime_ns


def shard_names(path: Path, header: GgufHeader) -> list[str]:
    """Names of the other files of a split model, which lie beside `path`; empty for a model in one file."""
    listed = header.metadata.get(FILES)
    if listed is None:
        if ID in header.metadata:
            raise ModelFileError(f"{path} is a part of a model; open the file that ends in -target.gguf or -draft.gguf")
        return _numbered_names(path, header)
    names = [item.decode("utf-8", errors="replace") for item in listed] if isinstance(listed, GgufStrings) else []
    if not 1 <= len(names) <= MAX_SHARDS or len(set(names)) < len(names):
        raise ModelFileError(f"{path} is not a usable model: {FILES} must be 1..{MAX_SHARDS} different file names")
    for name in names:
        if name in (".", "..", path.name) or not name.isprintable() or set(name) & set("/\\:\ufffd") or not name:
            raise ModelFileError(f"{path} is not a usable model: its part {name!r} is not a plain file name")
    return names


def _numbered_names(path: Path, header: GgufHeader) -> list[str]:
    """Names of the other files of a model that llama.cpp's tool split; empty for one in a single file."""
    count = header.metadata.get(COUNT)
    if not isinstance(count, int) or count < 2:
        return []
    parts = SPLIT_NAME.fullmatch(path.name)
    if parts is None or int(parts["count"]) != count:
        raise ModelFileError(
            f"{path} is one of {count} parts of a model, but is not named like one: give it the name that it was "
            f"published with, which ends in -00001-of-{count:05}.gguf"
        )
    names = [f"{parts['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if header.metadata.get(NUMBER) != 0 or path.name != names[0]:
        raise ModelFileError(f"{path} is a part of a model: open its first file, {names[0]}")
    return names[1:]


def with_shards(path: Path, header: GgufHeader) -> GgufHeader:
    """`header` with the tensors of all shards; as it is for a model in one file.

    Raises ModelFileError naming the shard that is missing, damaged, or of another model.
    """
    names = shard_names(path, header)
    _known[_key(path)] = tuple(names)
    if not names:
        return header
    if header.metadata.get(NUMBER) != 0 or header.metadata.get(COUNT) != len(names) + 1:
        raise ModelFileError(
            f"{path} is not a usable model: it names {len(names)} parts and says {NUMBER} "
            f"{header.metadata.get(NUMBER)!r}, {COUNT} {header.metadata.get(COUNT)!r}"
        )
    tensors = list(header.tensors)
    for number, name in enumerate(names, start=1):
        tensors += _read_shard(path, path.parent / name, header, number).tensors
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ModelFileError(f"{path} is not a usable model: two of its parts hold the same tensor. Export it again")
    if header.metadata.get(TENSORS) != len(tensors):
        raise ModelFileError(
            f"{path} is not a usable model: its parts hold {len(tensors)} tensors, it says "
            f"{header.metadata.get(TENSORS)!r}. Export it again"
        )
    return replace(header, tensors=tuple(tensors))


def _read_shard(path: Path, file: Path, header: GgufHeader, number: int) -> GgufHeader:
    try:
        shard = read_header(file)
    except ModelNotFound as exc:
        raise ModelFileError(
            f"{file} is missing, a part of {path.name}. Keep the files of a model together, under their names"
        ) from exc
    if shard.metadata.get(ID) != header.metadata.get(ID):
        raise ModelFileError(f"{file} belongs to another model than {path.name}. Export it again")
    if shard.metadata.get(NUMBER) != number:
        raise ModelFileError(
            f"{file} is part {shard.metadata.get(NUMBER)!r} of a model, {path.name} names it as part {number}"
        )
    return shard

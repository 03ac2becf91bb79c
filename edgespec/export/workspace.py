"""The working folder of an export: locked, with a journal of finished files, and renamed atomically at the end.

Files beside an output `NAME` while an export runs or after it was interrupted:

    .NAME.export.lock       file lock of the running export; the system releases it when the process ends
    .NAME.export/journal.json   finished stages with checksums, for one request
    .NAME.export/pair/      becomes NAME
    .NAME.export/temporary/ emptied at every start
    .NAME.replaced          the old output while --force replaces it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.errors import UsageError
from edgespec.formats.manifest import MANIFEST, sha256_of
from edgespec.platform.files import replace_folder, restore_folder, write_atomically, write_errors

JOURNAL_FORMAT = 1
_FIX = "choose another --output"


class Workspace:
    """The working folder of one export. Made by `opened`, which holds the lock."""

    def __init__(self, output: Path, *, replace: bool) -> None:
        self.output = output
        self.folder = output.with_name(f".{output.name}.export")
        self.pair = self.folder / "pair"
        self.temporary = self.folder / "temporary"
        self._replace = replace
        self._journal: dict[str, Any] = {}

    def begin(self, identity: Mapping[str, Any]) -> bool:
        """Start, or resume an interrupted export with the same `identity`; returns whether finished stages were kept.

        `identity`: JSON values that determine every byte of the result. Anything else in the folder is deleted.
        """
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._journal = self._read_journal()
        is_same = self._journal.get("format") == JOURNAL_FORMAT and self._journal.get("key") == key
        if not is_same:
            self.discard()
            self._journal = {"format": JOURNAL_FORMAT, "key": key, "stages": {}}
        shutil.rmtree(self.temporary, ignore_errors=True)
        for folder in (self.pair, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        self._write_journal()
        return is_same and bool(self._journal["stages"])

    def finished(self, stage: str) -> Any:
        """The recorded result of a stage; None if it is not finished or one of its files is missing or has changed.

        In the latter case the stage and its files are deleted.
        """
        entry = self._journal["stages"].get(stage)
        if entry is None:
            return None
        for name, facts in entry["files"].items():
            path = self.pair / name
            if not path.is_file() or path.stat().st_size != facts["bytes"] or sha256_of(path) != facts["sha256"]:
                self.forget(stage)
                return None
        return entry["result"]

    def finish(self, stage: str, files: list[str], result: Any) -> None:
        """Record a finished stage: its files (relative to `pair`) with size and checksum, and a JSON `result`."""
        facts = {}
        for name in files:
            path = self.pair / name
            _to_disk(path)
            facts[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        self._journal["stages"][stage] = {"files": facts, "result": result}
        self._write_journal()

    def forget(self, stage: str) -> None:
        """Delete a stage and its files."""
        entry = self._journal["stages"].pop(stage, {"files": {}})
        self._write_journal()
        for name in entry["files"]:
            (self.pair / name).unlink(missing_ok=True)

    def file_facts(self) -> dict[str, dict[str, Any]]:
        """`bytes` and `sha256` of every finished file, by its path relative to `pair`."""
        return {name: facts for entry in self._journal["stages"].values() for name, facts in entry["files"].items()}

    @property
    def finished_files(self) -> list[str]:
        """Names of the files of finished stages."""
        return sorted(self.file_facts()) if self._journal else []

    def drop_strays(self, wanted: set[str]) -> None:
        """Delete all files of `pair` except `wanted`: a killed export may have left incomplete ones."""
        for path in sorted(self.pair.rglob("*"), reverse=True):
            if path.is_dir():
                with contextlib.suppress(OSError):  # not empty
                    path.rmdir()
            elif path.relative_to(self.pair).as_posix() not in wanted:
                path.unlink()

    def publish(self) -> None:
        """Rename `pair` to the output, replacing an old output if `replace` was given. Raises UsageError if not."""
        if self.output.exists() and any(self.output.iterdir()) and not self._replace:
            raise UsageError(f"{self.output} appeared while the export ran: move it away, or give --force")
        replace_folder(self.pair, self.output)
        shutil.rmtree(self.folder, ignore_errors=True)

    def tidy(self) -> None:
        """Delete what a later run cannot use."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        if not self.finished_files:
            self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read_journal(self) -> dict[str, Any]:
        try:
            journal = json.loads((self.folder / "journal.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return journal if isinstance(journal, dict) else {}

    def _write_journal(self) -> None:
        write_atomically(self.folder / "journal.json", json.dumps(self._journal, indent=1))


@contextmanager
def opened(output: Path, *, replace: bool) -> Iterator[Workspace]:
    """The workspace of `output`, locked until the block ends.

    Raises UsageError if the output exists and `replace` is False, or another export is writing it; StateError where
    nothing can be written.
    """
    workspace = Workspace(output, replace=replace)
    with write_errors(output, fix=_FIX):
        output.parent.mkdir(parents=True, exist_ok=True)
    with locked(output.with_name(f".{output.name}.export.lock"), output):
        restore_folder(output)
        check_output(output, replace=replace)
        yield workspace


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


@contextmanager
def locked(path: Path, output: Path) -> Iterator[None]:
    """Hold a lock file that contains this process id; the lock of a dead process is taken over."""
    while True:
        with write_errors(output, fix=_FIX):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle)
        except OSError as error:
            os.lseek(handle, 0, os.SEEK_SET)  # on Windows `_lock` has left it behind the process id
            owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise UsageError(
                f"another edgespec (process {owner}) is writing {output}: wait for it, or choose another --output"
            ) from error
        # The previous holder may have deleted the file between open and lock; then try again.
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)
    try:
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        if sys.platform != "win32":  # an open file cannot be deleted on Windows
            path.unlink(missing_ok=True)
        os.close(handle)


def _lock(handle: int) -> None:
    """Lock without waiting. Raises OSError if another process holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(handle, 64, os.SEEK_SET)  # after the process id, which stays readable
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _to_disk(path: Path) -> None:
    """fsync a file, so that the journal never lists a file that is not on disk."""
    if sys.platform == "win32":  # a read-only handle cannot be flushed on Windows
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

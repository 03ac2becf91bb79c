"""The working folder of an export: locked, with a journal of finished files, and renamed atomically at the end.

Files beside an output `NAME` while an export runs or after it was interrupted:

    .NAME.export.lock       file lock of the running export
    .NAME.export/journal.json   what is finished, with checksums, for one request
    .NAME.export/pair/      becomes NAME
    .NAME.export/temporary/ emptied at every start
    .NAME.replaced          the old output while --force replaces it
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
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
from edgespec.formats.manifest import HEAD_KINDS, HEADS, MANIFEST, MANIFEST_FORMAT, sha256_of
from edgespec.platform.files import replace_folder, restore_folder, write_atomically, write_errors

TABLES = {"gguf": "files", "onnx": "onnx"}
_FIX = "choose another --output"
FileFacts = dict[str, dict[str, Any]]  # `bytes` and `sha256` by path


@dataclass(frozen=True, slots=True)
class Artefact:
    """One role in one format. `path` and `parts`: relative to the pair folder."""

    format: str
    role: str
    quant: str
    path: str
    parts: tuple[str, ...] = ()
    parameters: int | None = None

    @property
    def key(self) -> str:
        return f"{self.format}.{self.role}"

    @property
    def table(self) -> str:
        """Its table in the manifest."""
        return HEADS if self.role in HEAD_KINDS else TABLES[self.format]

    @property
    def label(self) -> str:
        return f"{self.role} {self.format} {self.quant}"

    def manifest_entry(self, facts: FileFacts) -> dict[str, Any]:
        entry: dict[str, Any] = {"path": self.path, **facts[self.path]}
        if self.parameters is not None:
            entry["parameters"] = self.parameters
        if self.parts:
            entry["parts"] = [{"path": part, **facts[part]} for part in self.parts]
        return entry


class Workspace:
    """The working folder of one export. Made by `opened`, which holds the lock."""

    def __init__(self, output: Path, *, replace: bool) -> None:
        self.output = output
        self.folder = output.with_name(f".{output.name}.export")
        self.pair = self.folder / "pair"
        self.temporary = self.folder / "temporary"
        self._replace = replace
        self._journal: dict[str, Any] = {"artefacts": {}}

    def begin(self, identity: Mapping[str, Any]) -> int:
        """Start, or resume an interrupted export with the same `identity`; the number of files that are finished.

        `identity`: JSON values that determine every byte of the result. Anything else in the folder is deleted.
        """
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._journal = self._read_journal()
        if self._journal.get("key") != key:
            self.discard()
            self._journal = {"key": key, "artefacts": {}}
        shutil.rmtree(self.temporary, ignore_errors=True)
        for folder in (self.pair, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        for made in list(self._journal["artefacts"]):
            if not self._is_whole(made):
                self.forget(made)
        self._drop_strays()
        self._write_journal()
        return len(self.file_facts())

    def finished(self, key: str) -> Artefact | None:
        """What is recorded under this key."""
        entry = self._journal["artefacts"].get(key)
        return None if entry is None else Artefact(**{**entry["artefact"], "parts": tuple(entry["artefact"]["parts"])})

    def finish(self, artefact: Artefact) -> None:
        """Record a finished artefact and its files with size and checksum."""
        facts = {}
        for name in (artefact.path, *artefact.parts):
            path = self.pair / name
            _to_disk(path)
            facts[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        self._journal["artefacts"][artefact.key] = {"artefact": dataclasses.asdict(artefact), "files": facts}
        self._write_journal()

    def forget(self, key: str) -> None:
        """Delete an artefact and its files."""
        entry = self._journal["artefacts"].pop(key, {"files": {}})
        self._write_journal()
        for name in entry["files"]:
            (self.pair / name).unlink(missing_ok=True)

    def file_facts(self) -> FileFacts:
        """`bytes` and `sha256` of every finished file, by its path relative to `pair`."""
        return {name: facts for entry in self._journal["artefacts"].values() for name, facts in entry["files"].items()}

    def publish(self) -> None:
        """Rename `pair` to the output, replacing an old output if `replace` was given. Raises UsageError if not."""
        if self.output.exists() and any(self.output.iterdir()) and not self._replace:
            raise UsageError(f"{self.output} appeared while the export ran: move it away, or give --force")
        replace_folder(self.pair, self.output)
        self.discard()

    def tidy(self) -> None:
        """Delete what a later run cannot use."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        if not self.file_facts():
            self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_whole(self, key: str) -> bool:
        """Whether all files of an artefact are there as they were written."""
        for name, facts in self._journal["artefacts"][key]["files"].items():
            path = self.pair / name
            if not path.is_file() or path.stat().st_size != facts["bytes"] or sha256_of(path) != facts["sha256"]:
                return False
        return True

    def _drop_strays(self) -> None:
        """Delete all files of `pair` that are not recorded: a killed export may have left incomplete ones."""
        wanted = self.file_facts()
        for path in sorted(self.pair.rglob("*"), reverse=True):
            if path.is_dir():
                with contextlib.suppress(OSError):  # not empty
                    path.rmdir()
            elif path.relative_to(self.pair).as_posix() not in wanted:
                path.unlink()

    def _read_journal(self) -> dict[str, Any]:
        try:
            journal = json.loads((self.folder / "journal.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return journal if isinstance(journal, dict) and isinstance(journal.get("artefacts"), dict) else {}

    def _write_journal(self) -> None:
        write_atomically(self.folder / "journal.json", json.dumps(self._journal, indent=1))


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
        restore_folder(output)
        check_output(output, replace=replace)
        yield Workspace(output, replace=replace)
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


def _to_disk(path: Path) -> None:
    """fsync a file, so that the journal never lists a file that is not on disk."""
    if sys.platform == "win32":  # a read-only handle cannot be flushed on Windows
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

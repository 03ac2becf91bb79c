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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from edgespec.errors import UsageError
from edgespec.formats.manifest import MANIFEST
from edgespec.platform.files import write_errors

_FIX = "choose another --output"


@contextmanager
def workspace(output: Path, *, replace: bool) -> Iterator[tuple[Path, Path]]:
    """(the folder that becomes `output` where the block ends without an error, one for what is needed meanwhile).

    Locked until then. Raises UsageError if the output exists and `replace` is False, or another export is writing it;
    StateError where nothing can be written.
    """
    folder = output.with_name(f".{output.name}.export")
    pair, temporary = folder / "pair", folder / "temporary"
    with _locked(output):
        check_output(output, replace=replace)
        try:
            shutil.rmtree(folder, ignore_errors=True)  # what an export that was killed left
            with write_errors(output, fix=_FIX):
                for each in (pair, temporary):
                    each.mkdir(parents=True)
            yield pair, temporary
            check_output(output, replace=replace)  # it may have appeared meanwhile
            _publish(pair, output)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(output: Path) -> Iterator[None]:
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
        yield
    finally:
        lock.release()
        if sys.platform != "win32":  # where the lock deletes its file itself
            Path(lock.lock_file).unlink(missing_ok=True)


def _publish(pair: Path, output: Path) -> None:
    replaced = output.with_name(f".{output.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.replace(replaced)
    try:
        pair.replace(output)
    except OSError:
        if replaced.exists():
            replaced.replace(output)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


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

"""Files that appear only when they are whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from edgespec.errors import UsageError

Progress = Callable[[int, int, str], None]  # (done, total, what is being done)


def no_progress(_done: int, _total: int, _what: str) -> None:
    pass


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, which becomes `path` when the block ends well and is gone when it does not.

    Raises UsageError when the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{path} cannot be written: {reason}. Free some space, or give another folder") from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """On the disk before it gets its name: after a loss of power the name must not stand for an empty file."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())

"""Paths as users and the environment give them: a path that cannot be followed is one where nothing is.

`pathlib` raises for some of them (RuntimeError for a loop of links or an unknown user, OSError for a name that is too
long or a folder that may not be entered, ValueError for a NUL), in the middle of questions that have a plain answer.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from edgespec.errors import ConfigError

MAX_TEXT_BYTES = 256 << 20  # of a file that is read whole; devices never end
AnyPath = str | os.PathLike[str]


def is_file(path: AnyPath) -> bool:
    """Whether a regular file is there, links followed, that can be asked for."""
    return os.path.isfile(path)


def is_folder(path: AnyPath) -> bool:
    """Whether a folder is there, links followed."""
    return os.path.isdir(path)


def exists(path: AnyPath) -> bool:
    """Whether anything is there, links followed."""
    return os.path.exists(path)


def expanded(path: AnyPath) -> Path:
    """`~` and `~user` as folders; those of an unknown user stay as they are, and nothing will be found there."""
    return Path(os.path.expanduser(path))


def resolved(path: AnyPath) -> Path:
    """The absolute path without links; where they lead in a circle, as far as they can be followed."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:  # it holds a NUL
        return Path(path).absolute()


def home_folder() -> Path:
    """The user's home folder. Raises ConfigError where there is none."""
    found = os.path.expanduser("~")
    if found == "~":
        raise ConfigError("this user has no home folder: set EDGESPEC_HOME (or HOME) to a folder of yours")
    return Path(found)


def read_text(path: AnyPath) -> str:
    """The text of a file in UTF-8, or of a pipe that somebody writes to; a pipe without a writer is empty.

    Raises OSError, for more than MAX_TEXT_BYTES too, and UnicodeDecodeError.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        contents = file.read(MAX_TEXT_BYTES + 1)
    if len(contents) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"has more than {MAX_TEXT_BYTES >> 20} MiB", os.fspath(path))
    return contents.decode("utf-8")


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting: a pipe would let its reader wait for a writer that may never come."""
    at_once = getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags | at_once)
    if at_once:
        os.set_blocking(handle, True)
    return handle

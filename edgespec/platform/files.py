"""Files and folders: paths as users give them, the folders that hold a user's own files, and writing atomically.

A path that cannot be followed counts as one where nothing is. `pathlib` raises for some of them (RuntimeError for a
loop of links or an unknown user, OSError for a name that is too long or a folder that may not be entered, ValueError
for a NUL), in the middle of questions that have a plain answer.

Files are written under a temporary name beside the final one and renamed when they are complete, so an interrupted run
never leaves half a file under its final name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

from edgespec.errors import ConfigError, StateError

MAX_TEXT_BYTES = 256 << 20  # of a file that is read whole; devices never end
_PIECE_BYTES = 1 << 20
_IN_USE_S = 2.0 if os.name == "nt" else 0.0
TEMPORARY = ".tmp"
AnyPath = str | os.PathLike[str]
WRITE_FIX = "free some space, or choose another place"
_NO_RIGHT = (errno.EROFS, errno.EACCES, errno.EPERM)  # where space is of no use
FolderKind = Literal["config", "data", "state", "cache"]


# Whether a regular file, a folder, or anything is there, links followed.
is_file, is_folder, exists = os.path.isfile, os.path.isdir, os.path.exists


def expanded(path: AnyPath) -> Path:
    """`~` and `~user` as folders; those of an unknown user stay as they are, and nothing will be found there."""
    return Path(os.path.expanduser(path))


def resolved(path: AnyPath) -> Path:
    """The absolute path without links; where they lead in a circle, as far as they can be followed."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:  # it holds a NUL
        return Path(path).absolute()


def absolute(path: AnyPath) -> Path:
    """The path from the root, without '..'; links stay as they are."""
    return Path(os.path.abspath(path))


def shipped_models() -> Path:
    """The folder of what comes with edgespec: `models/` of a source checkout, or inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    # Installed, the parent is site-packages, where a folder `models` would be somebody else's.
    is_checkout = is_file(package.parent / "pyproject.toml")
    return package.parent / "models" if is_checkout else package / "data" / "models"


def user_folder(kind: FolderKind, environ: Mapping[str, str] | None = None) -> Path:
    """The folder for edgespec's files of one kind: in EDGESPEC_HOME, else under XDG_<KIND>_HOME, else the platform's.

    Raises ConfigError where none of them is set and the user has no home folder.
    """
    environ = os.environ if environ is None else environ
    if home := environ.get("EDGESPEC_HOME"):
        return expanded(home) / "cache" if kind == "cache" else expanded(home)
    if chosen := environ.get(f"XDG_{kind.upper()}_HOME"):
        return Path(chosen, "edgespec")
    if os.path.expanduser("~") == "~":
        raise ConfigError("this user has no home folder: set EDGESPEC_HOME (or HOME) to a folder of yours")
    from platformdirs import PlatformDirs  # 10 ms that EDGESPEC_HOME saves

    return Path(getattr(PlatformDirs("edgespec", appauthor=False), f"user_{kind}_dir"))


def read_text(path: AnyPath) -> str:
    """The text of a file in UTF-8, or of a pipe that somebody writes to; a pipe without a writer is empty.

    A byte order mark, which Windows' programs put in front, is no part of it.

    Raises OSError, for more than MAX_TEXT_BYTES too, and UnicodeDecodeError.
    """
    contents = bytearray()
    with open(path, "rb", opener=_open_at_once) as file:
        while piece := file.read(_PIECE_BYTES):  # asked for at once, the most that is allowed would be allocated
            contents += piece
            if len(contents) > MAX_TEXT_BYTES:
                raise OSError(errno.EFBIG, f"has more than {MAX_TEXT_BYTES >> 20} MiB", os.fspath(path))
    return contents.decode("utf-8-sig")


def given_text(path: AnyPath, option: str) -> str:
    """As `read_text`, of the file that a user named for `option`; ~ is the home folder. Raises ConfigError."""
    try:
        return read_text(expanded(path))
    except (OSError, ValueError) as exc:  # ValueError: no UTF-8, a NUL in the name
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{option}: the file {os.fspath(path)!r} cannot be read: {reason}") from exc


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting: a pipe would let its reader wait for a writer that may never come."""
    at_once = getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags | at_once)
    if at_once:
        os.set_blocking(handle, True)
    return handle


@contextlib.contextmanager
def write_errors(path: Path, *others: type[Exception], fix: str = WRITE_FIX) -> Iterator[None]:
    """Raises OSError of the block as a StateError that names `path` and the `fix`.

    `others`: what a library raises in place of OSError when the disk is full.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except kinds as exc:
        reason = getattr(exc, "strerror", None) or f"is the disk full? ({exc})"
        if fix == WRITE_FIX and isinstance(exc, OSError) and exc.errno in _NO_RIGHT:
            fix = "choose another place"
        raise StateError(f"{path} cannot be written: {reason}; {fix}") from exc


def replace_file(new: Path, path: Path) -> None:
    """Rename `new` to `path`. Raises OSError.

    Windows refuses it while any program has the old file open, as readers and virus scanners do for a moment.
    """
    end_s = monotonic() + _IN_USE_S
    while True:
        try:
            new.replace(path)
            return
        except PermissionError:
            if monotonic() >= end_s:
                raise
        sleep(0.01)


@contextlib.contextmanager
def _replaced(path: Path, temporary: Path, *others: type[Exception]) -> Iterator[None]:
    """What the block writes to `temporary` becomes `path` at its end, or is removed if that fails."""
    with write_errors(path, *others):
        if path.exists() and not path.is_file():
            raise OSError(errno.EPERM, "it is no file")
        try:
            yield
            replace_file(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


@contextlib.contextmanager
def atomic_file(path: Path, *others: type[Exception]) -> Iterator[Path]:
    """Yields the path `NAME.tmp` for the block to write; it becomes `path` at the end, or is removed if that fails.

    For large files with one writer at a time: what a killed process left is overwritten by the next one. Raises
    StateError, as `write_errors` does.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    with _replaced(path, temporary, *others):
        yield temporary
        with temporary.open("rb+") as file:  # Windows flushes only what may be written
            os.fsync(file.fileno())


def write_atomically(
    path: Path, contents: str | bytes, *, parents: bool = False, private: bool = False, durable: bool = True
) -> None:
    """Replace `path` by a file with `contents`, text as UTF-8; several processes may do so at the same time.

    `parents`: make missing folders. `private`: only its owner may read it. `durable`: wait until the disk has it, so
    that it outlives a loss of power. Raises StateError when the file cannot be written.
    """
    try:
        data = contents.encode() if isinstance(contents, str) else contents
    except UnicodeEncodeError as exc:
        raise StateError(f"{path} cannot be written: the text is not valid Unicode ({exc.reason})") from exc
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    mode = 0o600 if private else 0o666
    with _replaced(path, temporary):
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())

"""SQLite files for texts: one per vocabulary and kind, in the user's data folder, readable by the user only.

SQLite handles concurrent processes, processes killed while writing, and full disks. Every operation opens its own
connection, so any thread may call.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edgespec.errors import StateError
from edgespec.platform.files import exists, user_folder
from edgespec.types import TokenIds
from edgespec.vocabulary import Vocabulary

FORMAT = 1


class DamagedError(StateError):
    """The file is not a database, or not one of edgespec's."""


def texts_folder() -> Path:
    """The folder for texts: `texts` in EDGESPEC_HOME, or in the platform's folder for user data."""
    return user_folder("data") / "texts"


def vocabulary_key(vocabulary: Vocabulary) -> str:
    """A hash of the vocabulary for use in file names; equal for all model files and engines with these tokens."""
    digest = hashlib.sha256()
    for token_id, piece in enumerate(vocabulary.pieces):
        known = piece or vocabulary.token_name(token_id).encode()
        digest.update(b"%d %d " % (len(known), bool(piece)) + known)
    return digest.hexdigest()[:20]


def digest_of(*parts: bytes) -> bytes:
    """A checksum that detects damaged or exchanged contents."""
    return hashlib.sha256(b"\0".join(parts)).digest()[:16]


def ids_of(blob: bytes, least: int, size: int) -> TokenIds:
    """Token ids [n] from bytes. Raises DamagedError unless all are within `least`..size - 1."""
    if len(blob) % 4:
        raise DamagedError(f"{len(blob)} bytes are not an array of token ids")
    ids = np.frombuffer(blob, "<i4").astype(np.int32)
    if ids.size and not (ids.min() >= least and ids.max() < size):
        raise DamagedError(f"a token id is outside {least}..{size - 1}")
    return ids


def bytes_of(token_ids: TokenIds) -> bytes:
    return token_ids.astype("<i4").tobytes()


@contextlib.contextmanager
def writing(path: Path, schema: str, *, timeout_s: float = 10.0, durable: bool = True) -> Iterator[sqlite3.Connection]:
    """A write transaction on the database `path`, created with `schema` if it is new; other writers wait.

    `durable`: wait for the disk, so that the data survives a power failure. Raises DamagedError, and StateError if the
    file cannot be opened or written, or stays locked for `timeout_s`.
    """
    with _translated(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        with contextlib.closing(sqlite3.connect(path, timeout=timeout_s, isolation_level=None)) as connection:
            connection.text_factory = _as_text
            if not durable:
                connection.execute("PRAGMA synchronous=OFF")
            connection.execute("PRAGMA secure_delete=ON")
            connection.execute("BEGIN IMMEDIATE")
            if not _has_tables(connection, path):
                _create(connection, schema)
            yield connection
            connection.execute("COMMIT")  # closing without it rolls back


@contextlib.contextmanager
def reading(path: Path, schema: str, *, timeout_s: float = 10.0) -> Iterator[sqlite3.Connection]:
    """A read transaction on the database `path`, which may be write-protected. Raises the errors of `writing`.

    Opened for writing if possible, because SQLite must first roll back what a killed process left incomplete.
    """
    with _translated(path), contextlib.ExitStack() as open_ones:
        connection = _connect(open_ones, f"{path.absolute().as_uri()}?mode=rw", timeout_s)
        connection.execute("BEGIN")
        if not _has_tables(connection, path):  # another process is creating it
            connection = _connect(open_ones, "file::memory:", timeout_s)
            _create(connection, schema)
        yield connection


def _connect(open_ones: contextlib.ExitStack, uri: str, timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, timeout=timeout_s, isolation_level=None, uri=True)
    connection.text_factory = _as_text
    return open_ones.enter_context(contextlib.closing(connection))


def _as_text(contents: bytes) -> str:
    """Text from the database; bytes that are not UTF-8 (not written by edgespec) are replaced."""
    return contents.decode("utf-8", errors="replace")


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as exc:
        raise StateError(f"{path} cannot be used: {exc}. Check the disk space and the folder's permissions") from exc
    except (sqlite3.Error, UnicodeDecodeError) as exc:  # sqlite3 raises the latter for its message about damaged text
        raise DamagedError(f"{path} is damaged: {exc}") from exc
    except OSError as exc:
        raise StateError(f"{path} cannot be used: {exc.strerror}. Make its folder writable") from exc


def _has_tables(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file has content; raises StateError if it has another format."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version != FORMAT and (version or num_tables):
        raise StateError(
            f"{path} has format {version} and this version of edgespec reads {FORMAT}: use the version that wrote it"
        )
    return bool(num_tables)


def _create(connection: sqlite3.Connection, schema: str) -> None:
    for statement in schema.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version={FORMAT}")


def remove(path: Path) -> bool:
    """Delete a database and its journal; returns False if there was none. Raises StateError."""
    existed = exists(path)
    try:
        for file in (path, path.with_name(path.name + "-journal")):
            file.unlink(missing_ok=True)
    except OSError as exc:
        raise StateError(f"{path} cannot be deleted: {exc.strerror}; delete it by hand") from exc
    return existed

"""The SQLite files that texts are kept in: one per vocabulary and kind, in the user's data folder, for their eyes only.

SQLite takes care of what goes wrong with files: several processes at once, one that is killed while it writes, a full
disk. A connection lives for one operation, so any thread may ask. What this file does not know: what the texts are for.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edgespec.errors import StateError
from edgespec.formats.files import exists, user_folder
from edgespec.types import TokenIds
from edgespec.vocabulary import Vocabulary

FORMAT = 1


class DamagedError(StateError):
    """The file is no database, or not one of ours."""


def texts_folder() -> Path:
    """Where texts are kept: `texts` in EDGESPEC_HOME, or in the platform's place for a user's data."""
    return user_folder("data") / "texts"


def vocabulary_key(vocabulary: Vocabulary) -> str:
    """What token ids mean in `vocabulary`, as a short file name: the same for every file and engine that shares it."""
    digest = hashlib.sha256()
    for token_id, piece in enumerate(vocabulary.pieces):
        known = piece or vocabulary.token_name(token_id).encode()
        digest.update(b"%d %d " % (len(known), bool(piece)) + known)
    return digest.hexdigest()[:20]


def digest_of(*parts: bytes) -> bytes:
    """A checksum that tells damaged or exchanged contents."""
    return hashlib.sha256(b"\0".join(parts)).digest()[:16]


def ids_of(blob: bytes, least: int, size: int) -> TokenIds:
    """Token ids [n] from their bytes. Raises DamagedError unless all lie within `least`..size - 1."""
    if len(blob) % 4:
        raise DamagedError(f"{len(blob)} bytes are no token ids")
    ids = np.frombuffer(blob, "<i4").astype(np.int32)
    if ids.size and not (ids.min() >= least and ids.max() < size):
        raise DamagedError(f"a token id lies outside {least}..{size - 1}")
    return ids


def bytes_of(token_ids: TokenIds) -> bytes:
    return token_ids.astype("<i4").tobytes()


@contextlib.contextmanager
def writing(path: Path, schema: str, *, timeout_s: float = 10.0, durable: bool = True) -> Iterator[sqlite3.Connection]:
    """A transaction on the database `path`, made with `schema` when it is new; others that write wait meanwhile.

    `durable`: what is written outlives a loss of power, at the cost of waiting for the disk. Raises DamagedError, and
    StateError when the file cannot be opened or written, or stays locked for `timeout_s`.
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
            connection.execute("COMMIT")  # what is closed without it is rolled back


@contextlib.contextmanager
def reading(path: Path, schema: str, *, timeout_s: float = 10.0) -> Iterator[sqlite3.Connection]:
    """The database `path` as it is, which may be write-protected. Raises as `writing`.

    It is opened for writing where that is possible: what a killed process left half done has to be taken back first.
    """
    with _translated(path), contextlib.ExitStack() as open_ones:
        connection = _connect(open_ones, f"{path.absolute().as_uri()}?mode=rw", timeout_s)
        connection.execute("BEGIN")
        if not _has_tables(connection, path):  # someone is about to write the first row
            connection = _connect(open_ones, "file::memory:", timeout_s)
            _create(connection, schema)
        yield connection


def _connect(open_ones: contextlib.ExitStack, uri: str, timeout_s: float) -> sqlite3.Connection:
    found = sqlite3.connect(uri, timeout=timeout_s, isolation_level=None, uri=True)
    found.text_factory = _as_text
    return open_ones.enter_context(contextlib.closing(found))


def _as_text(contents: bytes) -> str:
    """A text of the database: what is not UTF-8 in one was not written by us, and is shown as far as it can be."""
    return contents.decode("utf-8", errors="replace")


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as exc:
        raise StateError(f"{path} cannot be used: {exc}. See that the disk has room and the folder is yours") from exc
    except (sqlite3.Error, UnicodeDecodeError) as exc:  # the latter from its own message about damaged text
        raise DamagedError(f"{path} is damaged: {exc}") from exc
    except OSError as exc:
        raise StateError(f"{path} cannot be used: {exc.strerror}. Make its folder writable") from exc


def _has_tables(connection: sqlite3.Connection, path: Path) -> bool:
    """False for a new file. Raises StateError for one of another format."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if found != FORMAT and (found or num_tables):
        raise StateError(f"{path} has format {found} and this edgespec reads {FORMAT}: use the one that wrote it")
    return bool(num_tables)


def _create(connection: sqlite3.Connection, schema: str) -> None:
    for statement in schema.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version={FORMAT}")


def remove(path: Path) -> bool:
    """Delete a database with what SQLite left beside it; False when there was none. Raises StateError."""
    existed = exists(path)
    try:
        for file in (path, path.with_name(path.name + "-journal")):
            file.unlink(missing_ok=True)
    except OSError as exc:
        raise StateError(f"{path} cannot be removed: {exc.strerror}; delete it by hand") from exc
    return existed

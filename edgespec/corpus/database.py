"""The corpus: the user's own documents and code as token ids of one vocabulary, with a suffix index, stored on disk.

Text files and folders of them are read; files that are not text are skipped and counted. One row per text. The index is
stored with a signature of the texts that it was built from, and is built again if that does not match. Texts and index
are read into memory, not memory-mapped: if another program truncated a mapped file, the process would crash. The corpus
therefore has a size limit in bytes.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.corpus.index import BYTES_PER_TOKEN, SuffixIndex, sorted_places
from edgespec.corpus.store import DamagedError, bytes_of, digest_of, ids_of, reading, remove, texts_folder, writing
from edgespec.errors import ConfigError, StateError
from edgespec.platform.files import exists, is_file, is_folder
from edgespec.types import TokenIds

MAX_FILE_BYTES = 32 << 20
_SNIFFED_BYTES = 8192


class Documents:
    """The text files at or below `path`, read one by one; `left_out` counts skipped files by reason.

    Raises ConfigError if `path` does not exist, or is a file that cannot be read or is not text.
    """

    def __init__(self, path: Path) -> None:
        if not exists(path):
            raise ConfigError(f"no file or folder {str(path)!r}: give a text file or a folder of text files")
        self.path = path
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[tuple[Path, str]]:
        """(file, its text), sorted by name. Skips hidden files and folders, and links."""
        if not is_folder(self.path):
            text, reason = read_text(self.path)
            if reason:
                raise ConfigError(f"{self.path} is {reason}: give a file of text in UTF-8")
            yield self.path, text
            return
        for folder, subfolders, names in os.walk(self.path, onerror=self._count_folder):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                file = Path(folder) / name
                text, reason = read_text(file) if not file.is_symlink() else ("", "a link")
                if reason:
                    self.left_out[reason] += 1
                else:
                    yield file, text

    def _count_folder(self, error: OSError) -> None:
        self.left_out[f"unreadable, {error.strerror}"] += 1


def read_text(path: Path) -> tuple[str, str]:
    """(text of the file, ""), or ("", the reason why it is skipped)."""
    try:
        if not is_file(path):
            return "", "not a regular file"
        if path.stat().st_size > MAX_FILE_BYTES:
            return "", f"larger than {MAX_FILE_BYTES >> 20} MiB"
        contents = path.read_bytes()
    except OSError as exc:
        return "", f"unreadable, {exc.strerror}"
    if b"\0" in contents[:_SNIFFED_BYTES]:
        return "", "binary"
    try:
        text = contents.decode("utf-8-sig")
    except UnicodeDecodeError:
        return "", "not UTF-8"
    return (text, "") if text.strip() else ("", "empty")


logger = logging.getLogger("edgespec")
DEFAULT_BUDGET_BYTES = 64 << 20
MAX_BUDGET_BYTES = 4 << 30
MAX_NAME_LENGTH = 100
_MIB = 1 << 20
_TEXT_QUERY = """SELECT digest, ids, CAST(coalesce(documents, 0) AS INTEGER) FROM texts
    WHERE CAST(name AS TEXT) = ? AND source = ?"""
_SCHEMA = """CREATE TABLE texts (name TEXT PRIMARY KEY, source TEXT, added REAL, documents INTEGER,
    digest BLOB, ids BLOB);
CREATE TABLE places (signature BLOB PRIMARY KEY, digest BLOB, places BLOB);
CREATE TABLE budget (bytes INTEGER)"""


class CorpusText(NamedTuple):
    """One text of the corpus. `source`: its path; `added_s`: time of adding in seconds since 1970."""

    name: str
    source: str
    added_s: float
    num_documents: int
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """Size in memory and on disk, including its part of the index."""
        return self.num_tokens * BYTES_PER_TOKEN


class Corpus:
    """The corpus for one vocabulary: `key` as `vocabulary_key` gives it, `size` ids. `path`: its database file."""

    def __init__(self, key: str, size: int, folder: Path | None = None) -> None:
        self.path = (folder or texts_folder()) / f"corpus-{key}.sqlite"
        self._size = size

    def texts(self) -> list[CorpusText]:
        """All texts, sorted by name. Raises StateError if the file cannot be read."""
        if not exists(self.path):
            return []
        with reading(self.path, _SCHEMA) as database:
            return _texts(database)

    def budget_bytes(self) -> int:
        """Size limit of all texts together, in bytes. Raises StateError if the file cannot be read."""
        if not exists(self.path):
            return DEFAULT_BUDGET_BYTES
        with reading(self.path, _SCHEMA) as database:
            return _budget(database)

    def add(
        self,
        name: str,
        source: str,
        documents: list[TokenIds],
        budget_bytes: int | None = None,
        *,
        is_more: bool = False,
    ) -> CorpusText:
        """Store `documents` (each [n]) under `name`, replacing what the same source gave before.

        `budget_bytes`: new size limit of the corpus. `is_more`: nothing is replaced, they come after what the source
        gave before. Raises ConfigError if the name is not valid or is taken, or the limit would be exceeded; StateError
        if the file cannot be written. The corpus is then unchanged.
        """
        check_name(name)
        ids, num_documents = joined(documents), len(documents)
        with writing(self.path, _SCHEMA) as database:
            if is_more and (row := database.execute(_TEXT_QUERY, (name, source)).fetchone()):
                ids, num_documents = np.concatenate((self._checked(name, *row[:2]), ids)), row[2] + num_documents
            blob = bytes_of(ids)
            text = CorpusText(name, source, time.time(), num_documents, ids.size)
            if budget_bytes is not None:
                database.execute("DELETE FROM budget")
                database.execute("INSERT INTO budget VALUES (?)", (budget_bytes,))
            others = _texts(database)
            _check_name_is_free(text, others)
            check_budget(text, others, _budget(database))
            row = (*text[:-1], digest_of(blob), blob)
            database.execute("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?, ?)", row)
        try:
            self.index()  # sorted now, so that the next load need not
        except DamagedError as exc:  # of another text: this one is stored
            logger.warning("%s", exc)
        return text

    def check_is_free(self, name: str, source: str) -> None:
        """Raise ConfigError if `name` is taken by another source; StateError if the file cannot be read."""
        _check_name_is_free(CorpusText(name, source, 0.0, 0, 0), self.texts())

    def remove(self, name: str) -> CorpusText:
        """Remove a text. Raises ConfigError if there is no such text, StateError if the file cannot be written."""
        with writing(self.path, _SCHEMA) as database:
            known = {text.name: text for text in _texts(database)}
            if name not in known:
                raise ConfigError(f"the corpus has no {name!r}; it has: {', '.join(known) or 'nothing'}")
            database.execute("DELETE FROM texts WHERE CAST(name AS TEXT) = ?", (name,))
            database.execute("DELETE FROM places")
        return known[name]

    def clear(self) -> bool:
        """Delete the corpus, damaged or not; returns False if there was none. Raises StateError."""
        return remove(self.path)

    def index(self) -> SuffixIndex | None:
        """The suffix index of all texts; None if there are none.

        Raises StateError if a text is damaged or of another vocabulary, or the size limit is exceeded.
        """
        if not exists(self.path):
            return None
        try:
            with reading(self.path, _SCHEMA) as database:
                ids, signature = self._read(database)
                order = _read_places(database, signature, ids.size)
        except DamagedError as exc:
            raise DamagedError(f"the corpus is not used: {exc}; edgespec corpus rm removes one text, or --all") from exc
        if not ids.size:
            return None
        if order is None:
            order = sorted_places(ids)
            self._save_places(signature, order.astype("<i4").tobytes())
        return SuffixIndex(ids, order)

    def _read(self, database: sqlite3.Connection) -> tuple[TokenIds, bytes]:
        """(token ids [n] of all texts, their signature). Raises DamagedError."""
        total, budget = sum(text.num_bytes for text in _texts(database)), _budget(database)
        if total > budget:
            raise DamagedError(f"it takes {total / _MIB:.1f} MiB and its budget is {budget / _MIB:.1f} MiB")
        parts, digests = [np.empty(0, np.int32)], []
        for name, digest, blob in database.execute("SELECT name, digest, ids FROM texts ORDER BY name"):
            parts.append(self._checked(name, digest, blob))
            digests.append(digest)
        return np.concatenate(parts), digest_of(*digests)

    def _checked(self, name: str, digest: object, blob: object) -> TokenIds:
        """The token ids [n] of a text. Raises DamagedError."""
        if not isinstance(blob, bytes) or digest != digest_of(blob):
            raise DamagedError(f"the text {name!r} does not match its checksum")
        return ids_of(blob, -1, self._size)

    def _save_places(self, signature: bytes, blob: bytes) -> None:
        try:
            with writing(self.path, _SCHEMA) as database:
                database.execute("DELETE FROM places")
                database.execute("INSERT INTO places VALUES (?, ?, ?)", (signature, digest_of(signature, blob), blob))
        except StateError as exc:
            logger.debug("the index of the corpus was not saved: %s", exc)


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is printable, on one line and not an option."""
    if not (0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() and name == name.strip()):
        raise ConfigError(f"{name!r} is not a valid name: give 1..{MAX_NAME_LENGTH} printable characters with --name")
    if name.startswith("-"):
        raise ConfigError(f"the name {name!r} would be taken for an option: give another with --name")


def check_budget(text: CorpusText, others: list[CorpusText], budget_bytes: int) -> None:
    """Raise ConfigError if `text` and the `others` with other names together exceed the size limit."""
    taken = sum(other.num_bytes for other in others if other.name != text.name)
    if taken + text.num_bytes > budget_bytes:
        raise ConfigError(
            f"{text.source} takes {text.num_bytes / _MIB:.1f} MiB with its index, but {taken / _MIB:.1f} MiB of the "
            f"corpus's budget of {budget_bytes / _MIB:.1f} MiB are in use: add less, free space with edgespec corpus "
            "rm NAME, or raise the budget with edgespec corpus add ... --budget "
            f"{int((taken + text.num_bytes) / _MIB) + 1}"
        )


def joined(documents: list[TokenIds]) -> TokenIds:
    """All documents as one array [n], each followed by END_OF_TEXT."""
    end = np.array([-1], np.int32)
    return np.concatenate([part for ids in documents for part in (ids, end)] or [np.empty(0, np.int32)])


def _texts(database: sqlite3.Connection) -> list[CorpusText]:
    # Sizes are computed from the data, so that a damaged file cannot exceed the budget in memory. SQLite stores any
    # type in any column; the casts list such foreign rows too, so that they can be removed.
    query = """SELECT CAST(coalesce(name, '') AS TEXT), CAST(coalesce(source, '') AS TEXT),
        CAST(coalesce(added, 0) AS REAL), CAST(coalesce(documents, 0) AS INTEGER), coalesce(length(ids), 0) / 4
        FROM texts ORDER BY name"""
    return [CorpusText(*row) for row in database.execute(query)]


def _budget(database: sqlite3.Connection) -> int:
    row = database.execute("SELECT coalesce(CAST(bytes AS INTEGER), 0) FROM budget").fetchone()
    return DEFAULT_BUDGET_BYTES if row is None else int(row[0])


def _check_name_is_free(text: CorpusText, others: list[CorpusText]) -> None:
    taken = next((other for other in others if other.name == text.name), None)
    if taken is not None and taken.source != text.source:
        raise ConfigError(
            f"the corpus already has a text {text.name!r}, from {taken.source}: give this one another name with --name"
        )


def _read_places(database: sqlite3.Connection, signature: bytes, num_tokens: int) -> TokenIds | None:
    """The stored suffix array [n] for texts of this signature; None if it is missing or damaged."""
    row = database.execute("SELECT digest, places FROM places WHERE signature = ?", (signature,)).fetchone()
    if row is None or not isinstance(row[1], bytes) or row[0] != digest_of(signature, row[1]):
        return None
    return ids_of(row[1], 0, num_tokens) if len(row[1]) == 4 * num_tokens else None

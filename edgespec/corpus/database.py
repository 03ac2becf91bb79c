"""The corpus: a user's own documents and code as token ids of one vocabulary, and their suffix index, kept on disk.

One row per text that was added. The index is derived: it is kept with a signature of the texts it was made from, and
made anew where that does not fit. All of it is read into memory when it is used and not mapped, since a mapped file
that another program cuts short ends the process; so its size counts against a budget of bytes.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.corpus.index import BYTES_PER_TOKEN, SuffixIndex, sorted_places
from edgespec.corpus.store import DamagedError, bytes_of, digest_of, ids_of, reading, remove, texts_folder, writing
from edgespec.errors import ConfigError, StateError
from edgespec.formats.files import exists
from edgespec.types import TokenIds

logger = logging.getLogger("edgespec")
DEFAULT_BUDGET_BYTES = 64 << 20
MAX_BUDGET_BYTES = 4 << 30
MAX_NAME_LENGTH = 100
_MIB = 1 << 20
_SCHEMA = """CREATE TABLE texts (name TEXT PRIMARY KEY, source TEXT, added REAL, documents INTEGER,
    digest BLOB, ids BLOB);
CREATE TABLE places (signature BLOB PRIMARY KEY, digest BLOB, places BLOB);
CREATE TABLE budget (bytes INTEGER)"""


class CorpusText(NamedTuple):
    """One text of the corpus: where it came from, when it was added (seconds since 1970), and how large it is."""

    name: str
    source: str
    added_s: float
    num_documents: int
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """Of memory and of disk, its part of the index included."""
        return self.num_tokens * BYTES_PER_TOKEN


class Corpus:
    """The texts that were added for the vocabulary `key`, of `size` ids; `path` is their file."""

    def __init__(self, key: str, size: int, folder: Path | None = None) -> None:
        self.path = (folder or texts_folder()) / f"corpus-{key}.sqlite"
        self._size = size

    def texts(self) -> list[CorpusText]:
        """What was added, by name. Raises StateError where it cannot be read."""
        if not exists(self.path):
            return []
        with reading(self.path, _SCHEMA) as found:
            return _texts(found)

    def budget_bytes(self) -> int:
        """What all texts together may take. Raises StateError where it cannot be read."""
        if not exists(self.path):
            return DEFAULT_BUDGET_BYTES
        with reading(self.path, _SCHEMA) as found:
            return _budget(found)

    def add(self, name: str, source: str, documents: list[TokenIds], budget_bytes: int | None = None) -> CorpusText:
        """Keep `documents` (each [n]) under `name`, in place of what the same source gave before.

        `budget_bytes`: a new budget from now on. Raises ConfigError for a bad or taken name and when the budget does
        not suffice, StateError when nothing can be written; what was there is then as before.
        """
        check_name(name)
        ids = joined(documents)
        blob = bytes_of(ids)
        text = CorpusText(name, source, time.time(), len(documents), ids.size)
        with writing(self.path, _SCHEMA) as found:
            if budget_bytes is not None:
                found.execute("DELETE FROM budget")
                found.execute("INSERT INTO budget VALUES (?)", (budget_bytes,))
            others = _texts(found)
            _check_name_is_free(text, others)
            check_budget(text, others, _budget(found))
            row = (*text[:-1], digest_of(blob), blob)
            found.execute("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?, ?)", row)
        self.index()
        return text

    def remove(self, name: str) -> CorpusText:
        """Take a text out. Raises ConfigError for one that is not there, StateError when nothing can be written."""
        with writing(self.path, _SCHEMA) as found:
            known = {text.name: text for text in _texts(found)}
            if name not in known:
                raise ConfigError(f"the corpus has no {name!r}; it has: {', '.join(known) or 'nothing'}")
            found.execute("DELETE FROM texts WHERE CAST(name AS TEXT) = ?", (name,))
            found.execute("DELETE FROM places")
        return known[name]

    def clear(self) -> bool:
        """Remove all, damaged or not; False when there was nothing. Raises StateError."""
        return remove(self.path)

    def index(self) -> SuffixIndex | None:
        """The index of all texts, ready for drafting; None when there are none.

        Raises StateError naming the fix where a text is damaged, of another vocabulary, or beyond the budget.
        """
        if not exists(self.path):
            return None
        try:
            with reading(self.path, _SCHEMA) as found:
                ids, signature = self._read(found)
                order = _read_places(found, signature, ids.size)
        except DamagedError as exc:
            raise DamagedError(
                f"the corpus is not used: {exc}; edgespec corpus ls shows it, corpus rm takes a text or --all out"
            ) from exc
        if not ids.size:
            return None
        if order is None:
            order = sorted_places(ids)
            self._keep_places(signature, order.astype("<i4").tobytes())
        return SuffixIndex(ids, order)

    def _read(self, found: sqlite3.Connection) -> tuple[TokenIds, bytes]:
        """(the ids [n] of all texts, their signature)."""
        total, budget = sum(text.num_bytes for text in _texts(found)), _budget(found)
        if total > budget:
            raise DamagedError(f"it takes {total / _MIB:.1f} MiB and its budget is {budget / _MIB:.1f} MiB")
        parts, digests = [np.empty(0, np.int32)], []
        for name, digest, blob in found.execute("SELECT name, digest, ids FROM texts ORDER BY name"):
            if not isinstance(blob, bytes) or digest != digest_of(blob):
                raise DamagedError(f"the text {name!r} does not have the checksum that it was added with")
            parts.append(ids_of(blob, -1, self._size))
            digests.append(digest)
        return np.concatenate(parts), digest_of(*digests)

    def _keep_places(self, signature: bytes, blob: bytes) -> None:
        try:
            with writing(self.path, _SCHEMA) as found:
                found.execute("DELETE FROM places")
                found.execute("INSERT INTO places VALUES (?, ?, ?)", (signature, digest_of(signature, blob), blob))
        except StateError as exc:
            logger.debug("the index of the corpus is not kept: %s", exc)


def check_name(name: str) -> None:
    """Raises ConfigError unless `name` can be typed and shown in a line."""
    if not (0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() and name == name.strip()):
        raise ConfigError(f"{name!r} is no name for a text: give 1..{MAX_NAME_LENGTH} printable characters with --name")
    if name.startswith("-"):
        raise ConfigError(f"the name {name!r} would be taken for an option: give another with --name")


def check_budget(text: CorpusText, others: list[CorpusText], budget_bytes: int) -> None:
    """Raises ConfigError when `text` and the `others` (of other names) together exceed the budget."""
    taken = sum(other.num_bytes for other in others if other.name != text.name)
    if taken + text.num_bytes > budget_bytes:
        raise ConfigError(
            f"{text.source} takes {text.num_bytes / _MIB:.1f} MiB as it is indexed, and of the corpus's budget of "
            f"{budget_bytes / _MIB:.1f} MiB {taken / _MIB:.1f} MiB are taken: add less, make room with edgespec corpus "
            f"rm NAME, or raise the budget with --budget {int((taken + text.num_bytes) / _MIB) + 1}"
        )


def joined(documents: list[TokenIds]) -> TokenIds:
    """All documents [n], END_OF_TEXT behind each."""
    end = np.array([-1], np.int32)
    return np.concatenate([part for ids in documents for part in (ids, end)] or [np.empty(0, np.int32)])


def _texts(found: sqlite3.Connection) -> list[CorpusText]:
    # Sizes are measured, not believed: a damaged file must not be read into more memory than the budget has. SQLite
    # keeps any type in any column, and a row that somebody else wrote is to be shown too, so that it can be removed.
    query = """SELECT CAST(coalesce(name, '') AS TEXT), CAST(coalesce(source, '') AS TEXT),
        CAST(coalesce(added, 0) AS REAL), CAST(coalesce(documents, 0) AS INTEGER), coalesce(length(ids), 0) / 4
        FROM texts ORDER BY name"""
    return [CorpusText(*row) for row in found.execute(query)]


def _budget(found: sqlite3.Connection) -> int:
    row = found.execute("SELECT coalesce(CAST(bytes AS INTEGER), 0) FROM budget").fetchone()
    return DEFAULT_BUDGET_BYTES if row is None else int(row[0])


def _check_name_is_free(text: CorpusText, others: list[CorpusText]) -> None:
    taken = next((other for other in others if other.name == text.name), None)
    if taken is not None and taken.source != text.source:
        raise ConfigError(
            f"the corpus has a text {text.name!r} already, from {taken.source}: give this one another name with --name"
        )


def _read_places(found: sqlite3.Connection, signature: bytes, num_tokens: int) -> TokenIds | None:
    """The sorted places [n] that were kept for texts of this signature; None where they are missing or damaged."""
    row = found.execute("SELECT digest, places FROM places WHERE signature = ?", (signature,)).fetchone()
    if row is None or not isinstance(row[1], bytes) or row[0] != digest_of(signature, row[1]):
        return None
    return ids_of(row[1], 0, num_tokens) if len(row[1]) == 4 * num_tokens else None

"""Earlier answers, stored so that later answers can be drafted from them. Prompts are not stored.

One row per answer; the oldest are deleted by total size and by age. The data only saves time, so a damaged file is
replaced, and a file that cannot be written is ignored.
"""

from __future__ import annotations

import logging
import time
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from edgespec.corpus.store import DamagedError, bytes_of, digest_of, ids_of, reading, remove, texts_folder, writing
from edgespec.errors import StateError
from edgespec.platform.files import exists
from edgespec.types import TokenIds

logger = logging.getLogger("edgespec")
MAX_TOKENS = 1 << 18  # of all stored answers
MAX_ANSWER_TOKENS = 1 << 14
MAX_AGE_S = 180 * 24 * 3600.0
_LEAST_TOKENS = 4  # shorter answers are not stored
_TIMEOUT_S = 2.0
_SCHEMA = "CREATE TABLE answers (digest BLOB PRIMARY KEY, made REAL, tokens INTEGER, ids BLOB)"
# SQLite stores any type in any column; rows that another program wrote must not evict answers.
_FOREIGN = """DELETE FROM answers WHERE typeof(made) != 'real' OR typeof(tokens) != 'integer'
    OR tokens NOT BETWEEN 0 AND ?"""
_EVICT = """DELETE FROM answers WHERE made < ? OR digest IN (SELECT digest FROM (
    SELECT digest, total(tokens) OVER (ORDER BY made DESC, digest) AS newer FROM answers) WHERE newer > ?)"""


class Kept(NamedTuple):
    """Number of stored answers and of their tokens."""

    num_answers: int
    num_tokens: int


class LearntTexts:
    """Stored answers of one vocabulary: `key` as `vocabulary_key` gives it, `size` ids. `path`: the database file."""

    def __init__(
        self,
        key: str,
        size: int,
        max_tokens: int = MAX_TOKENS,
        max_age_s: float = MAX_AGE_S,
        folder: Path | None = None,
    ) -> None:
        self.path = (folder or texts_folder()) / f"learnt-{key}.sqlite"
        self._size, self._max_tokens, self._max_age_s = size, max_tokens, max_age_s

    def read(self) -> list[TokenIds]:
        """All stored answers (each [n]), oldest first; empty if the file cannot be read."""
        if not exists(self.path):
            return []
        try:
            with reading(self.path, _SCHEMA, timeout_s=_TIMEOUT_S) as database:
                rows = database.execute("SELECT digest, ids FROM answers ORDER BY made DESC, digest").fetchall()
        except DamagedError as exc:
            self._replace_damaged(exc)
            return []
        except StateError as exc:
            logger.warning("earlier answers are not used for drafting: %s", exc)
            return []
        answers = [ids for digest, blob in rows if (ids := self._checked(digest, blob)) is not None]
        if len(answers) < len(rows):
            logger.warning("%d earlier answers in %s are damaged and are not used", len(rows) - len(answers), self.path)
        sizes = accumulate(ids.size for ids in answers)
        return [ids for ids, size in zip(answers, sizes, strict=True) if size <= self._max_tokens][::-1]

    def add(self, token_ids: TokenIds) -> None:
        """Store an answer [n]; storing it again renews its age. Failures are logged, never raised."""
        token_ids = token_ids[:MAX_ANSWER_TOKENS]
        if token_ids.size < _LEAST_TOKENS:
            return
        if not exists(self.path):
            logger.info("learning from answers: on, file %s (edgespec corpus rm --learnt deletes it)", self.path)
        try:
            self._write(token_ids)
        except DamagedError as exc:
            self._replace_damaged(exc)
        except StateError as exc:
            logger.warning("this answer was not stored: %s", exc)

    def kept(self) -> Kept:
        """Number of answers and tokens in the file. Raises StateError if it cannot be read."""
        if not exists(self.path):
            return Kept(0, 0)
        with reading(self.path, _SCHEMA) as database:
            query = "SELECT count(*), CAST(total(CAST(tokens AS INTEGER)) AS INTEGER) FROM answers"
            return Kept(*database.execute(query).fetchone())

    def clear(self) -> bool:
        """Delete all answers; returns False if there were none. Raises StateError."""
        return remove(self.path)

    def _write(self, token_ids: TokenIds) -> None:
        blob, now = bytes_of(token_ids), time.time()
        with writing(self.path, _SCHEMA, timeout_s=_TIMEOUT_S, durable=False) as database:
            row = (digest_of(blob), now, token_ids.size, blob)
            database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", row)
            database.execute(_FOREIGN, (MAX_ANSWER_TOKENS,))
            database.execute(_EVICT, (now - self._max_age_s, self._max_tokens))

    def _checked(self, digest: object, blob: object) -> TokenIds | None:
        if not isinstance(blob, bytes) or digest != digest_of(blob):
            return None
        try:
            return ids_of(blob, 0, self._size)
        except DamagedError:
            return None

    def _replace_damaged(self, reason: DamagedError) -> None:
        logger.warning("%s; it is replaced by a new file", reason)
        try:
            remove(self.path)
        except StateError as exc:
            logger.warning("%s", exc)

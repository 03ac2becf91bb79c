"""What models wrote lately, kept so that later answers can be drafted from it; prompts are not kept.

One row per answer. The oldest go when there are too many or they are too old. Losing all of it costs time and nothing
else, so a damaged file is replaced by a new one, and a file that cannot be written is left alone.
"""

from __future__ import annotations

import logging
import time
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from edgespec.corpus.store import DamagedError, bytes_of, digest_of, ids_of, reading, remove, texts_folder, writing
from edgespec.errors import StateError
from edgespec.formats.files import exists
from edgespec.types import TokenIds

logger = logging.getLogger("edgespec")
MAX_TOKENS = 1 << 18  # of all answers that are kept
MAX_ANSWER_TOKENS = 1 << 14
MAX_AGE_S = 180 * 24 * 3600.0
_LEAST_TOKENS = 4  # shorter answers are not worth a row
_TIMEOUT_S = 2.0
_SCHEMA = "CREATE TABLE answers (digest BLOB PRIMARY KEY, made REAL, tokens INTEGER, ids BLOB)"
# SQLite keeps any type in any column: a row that somebody else wrote must not push out what was learnt.
_FOREIGN = """DELETE FROM answers WHERE typeof(made) != 'real' OR typeof(tokens) != 'integer'
    OR tokens NOT BETWEEN 0 AND ?"""
_EVICT = """DELETE FROM answers WHERE made < ? OR digest IN (SELECT digest FROM (
    SELECT digest, total(tokens) OVER (ORDER BY made DESC, digest) AS newer FROM answers) WHERE newer > ?)"""


class Kept(NamedTuple):
    """How much is kept."""

    num_answers: int
    num_tokens: int


class LearntTexts:
    """The answers that were written in the vocabulary `key`, of `size` ids; `path` is their file."""

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
        """All answers [n] that are kept, the oldest first; none where the file cannot be read."""
        if not exists(self.path):
            return []
        try:
            with reading(self.path, _SCHEMA, timeout_s=_TIMEOUT_S) as found:
                rows = found.execute("SELECT digest, ids FROM answers ORDER BY made DESC, digest").fetchall()
        except DamagedError as exc:
            self._start_anew(exc)
            return []
        except StateError as exc:
            logger.info("nothing is drafted from earlier answers: %s", exc)
            return []
        answers = [ids for digest, blob in rows if (ids := self._checked(digest, blob)) is not None]
        if len(answers) < len(rows):
            logger.info("%d earlier answers in %s are damaged and not used", len(rows) - len(answers), self.path)
        sizes = accumulate(ids.size for ids in answers)
        return [ids for ids, size in zip(answers, sizes, strict=True) if size <= self._max_tokens][::-1]

    def add(self, token_ids: TokenIds) -> None:
        """Keep an answer [n]; the same one again counts as new. Never fails: what cannot be kept is not."""
        token_ids = token_ids[:MAX_ANSWER_TOKENS]
        if token_ids.size < _LEAST_TOKENS:
            return
        if not exists(self.path):
            logger.info(
                "learning from answers: on, they are kept in %s (edgespec corpus rm --learnt deletes them)", self.path
            )
        try:
            self._write(token_ids)
        except DamagedError as exc:
            self._start_anew(exc)
        except StateError as exc:
            logger.info("this answer is not kept: %s", exc)

    def kept(self) -> Kept:
        """How much there is. Raises StateError where it cannot be read."""
        if not exists(self.path):
            return Kept(0, 0)
        with reading(self.path, _SCHEMA) as found:
            query = "SELECT count(*), CAST(total(CAST(tokens AS INTEGER)) AS INTEGER) FROM answers"
            return Kept(*found.execute(query).fetchone())

    def clear(self) -> bool:
        """Remove all; False when there was nothing. Raises StateError."""
        return remove(self.path)

    def _write(self, token_ids: TokenIds) -> None:
        blob, now = bytes_of(token_ids), time.time()
        with writing(self.path, _SCHEMA, timeout_s=_TIMEOUT_S, durable=False) as found:
            row = (digest_of(blob), now, token_ids.size, blob)
            found.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", row)
            found.execute(_FOREIGN, (MAX_ANSWER_TOKENS,))
            found.execute(_EVICT, (now - self._max_age_s, self._max_tokens))

    def _checked(self, digest: object, blob: object) -> TokenIds | None:
        if not isinstance(blob, bytes) or digest != digest_of(blob):
            return None
        try:
            return ids_of(blob, 0, self._size)
        except DamagedError:
            return None

    def _start_anew(self, reason: DamagedError) -> None:
        logger.info("%s; a new one is begun", reason)
        try:
            remove(self.path)
        except StateError as exc:
            logger.info("%s", exc)

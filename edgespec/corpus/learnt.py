"""Earlier answers, stored so that later answers can be drafted from them. Prompts are not stored.

All answers of a vocabulary are one file; the oldest are dropped by total size and by age. The data only saves time, so
a damaged file is replaced, and a file that cannot be written is ignored.
"""

from __future__ import annotations

import logging
import time
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.corpus.store import DamagedError, checked_ids, read_arrays, remove, texts_folder, write_arrays
from edgespec.errors import StateError
from edgespec.platform.files import exists
from edgespec.types import TokenIds

logger = logging.getLogger("edgespec")
MAX_TOKENS = 1 << 18  # of all stored answers
MAX_ANSWER_TOKENS = 1 << 14
MAX_AGE_S = 180 * 24 * 3600.0
_LEAST_TOKENS = 4  # shorter answers are not stored


class Kept(NamedTuple):
    """Number of stored answers and of their tokens."""

    num_answers: int
    num_tokens: int


class LearntTexts:
    """Stored answers of one vocabulary: `key` as `vocabulary_key` gives it, `size` ids. `path`: the file."""

    def __init__(
        self,
        key: str,
        size: int,
        max_tokens: int = MAX_TOKENS,
        max_age_s: float = MAX_AGE_S,
        folder: Path | None = None,
    ) -> None:
        self.path = (folder or texts_folder()) / f"learnt-{key}.npz"
        self._size, self._max_tokens, self._max_age_s = size, max_tokens, max_age_s

    def read(self) -> list[TokenIds]:
        """All stored answers (each [n]), oldest first; empty if the file cannot be read, which is logged."""
        return [ids for _, ids in self._stored()]

    def add(self, token_ids: TokenIds) -> None:
        """Store an answer [n]; storing it again renews its age. Failures are logged, never raised."""
        token_ids, now = token_ids[:MAX_ANSWER_TOKENS].astype(np.int32), time.time()
        if token_ids.size < _LEAST_TOKENS:
            return
        if not exists(self.path):
            logger.info("learning from answers: on, file %s (edgespec corpus rm --learnt deletes it)", self.path)
        known = [
            (made_s, ids)
            for made_s, ids in self._stored()
            if made_s >= now - self._max_age_s and not np.array_equal(ids, token_ids)
        ]
        newest_first = [(now, token_ids), *reversed(known)]
        sizes = accumulate(ids.size for _, ids in newest_first)
        kept = [each for each, size in zip(newest_first, sizes, strict=True) if size <= self._max_tokens][::-1]
        made, parts = np.array([made_s for made_s, _ in kept], np.float64), [ids for _, ids in kept]
        sizes_kept, ids = np.array([part.size for part in parts], np.int32), np.concatenate(parts or [token_ids[:0]])
        try:
            write_arrays(self.path, durable=False, made=made, sizes=sizes_kept, ids=ids)
        except StateError as exc:
            logger.warning("this answer was not stored: %s", exc)

    def kept(self) -> Kept:
        """Number of answers and tokens in the file."""
        stored = self._stored()
        return Kept(len(stored), sum(ids.size for _, ids in stored))

    def clear(self) -> bool:
        """Delete all answers; returns False if there were none. Raises StateError."""
        return remove(self.path)

    def _stored(self) -> list[tuple[float, TokenIds]]:
        """(when it was made, in seconds since 1970; its ids [n]) of each answer, the oldest first."""
        if not exists(self.path):
            return []
        try:
            made, sizes, stored = read_arrays(self.path, "made", "sizes", "ids")
            ids = checked_ids(self.path, stored, 0, self._size)
            if made.shape != sizes.shape or sizes.ndim != 1 or sizes.sum() != ids.size:
                raise DamagedError(self.path, "its answers have other sizes")
        except StateError as exc:
            logger.warning("earlier answers are not used for drafting: %s", exc)
            return []
        return list(zip(made.tolist(), np.split(ids, np.cumsum(sizes)[:-1]), strict=True)) if made.size else []

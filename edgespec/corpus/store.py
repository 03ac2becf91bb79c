"""Files of texts as token ids: .npz archives in the user's data folder, readable by the user only; earlier answers.

Each is written whole and atomically, so that processes, kills and full disks leave the old file or the new one; the
archive's own checksums tell damage.
"""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.corpus.index import END_OF_TEXT, joined
from edgespec.errors import StateError
from edgespec.formats.head_file import UNREADABLE_NPZ
from edgespec.platform.files import exists, user_folder, write_atomically
from edgespec.types import TokenIds
from edgespec.vocabulary import Vocabulary

logger = logging.getLogger("edgespec")
MAX_TOKENS = 1 << 18  # of all stored answers
MAX_ANSWER_TOKENS = 1 << 14
_LEAST_TOKENS = 4  # shorter answers are not stored


class DamagedError(StateError):
    """The file is not one of edgespec's, or not as it was written."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged, delete it: {why}")


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


def write_arrays(path: Path, *, durable: bool = True, **arrays: NDArray[Any]) -> None:
    """Replace `path`. `durable`: as in `write_atomically`. Raises StateError."""
    contents = io.BytesIO()
    np.savez(contents, allow_pickle=False, **arrays)
    write_atomically(path, contents.getvalue(), parents=True, private=True, durable=durable)


def read_arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    """The arrays of these `names`. Raises DamagedError, and StateError for a file that cannot be opened."""
    try:
        with zipfile.ZipFile(path) as stored:  # numpy reads what it was given before it looks at the checksum
            return [np.lib.format.read_array(io.BytesIO(stored.read(f"{name}.npy"))) for name in names]
    except PermissionError as exc:
        raise StateError(f"{path} cannot be used: {exc.strerror}. Make its folder readable") from exc
    except UNREADABLE_NPZ as exc:
        raise DamagedError(path, str(exc)) from exc


def checked_ids(path: Path, token_ids: NDArray[Any], least: int, size: int) -> TokenIds:
    """The token ids [n] that `path` holds. Raises DamagedError unless all are within `least`..size - 1."""
    if token_ids.dtype != np.int32 or token_ids.ndim != 1:
        raise DamagedError(path, "it holds no list of token ids")
    if token_ids.size and not (token_ids.min() >= least and token_ids.max() < size):
        raise DamagedError(path, f"a token id is outside {least}..{size - 1}")
    return token_ids


def remove(path: Path) -> bool:
    """Delete a file; returns False if there was none. Raises StateError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise StateError(f"{path} cannot be deleted: {exc.strerror}; delete it by hand") from exc
    return True


class LearntTexts:
    """Earlier answers in one vocabulary, without their prompts: `key` as `vocabulary_key` gives it, `size` ids.

    They are one file, `path`, of which the oldest answers are dropped beyond `max_tokens`. The data only saves time, so
    a damaged file is replaced, and a file that cannot be written is ignored.
    """

    def __init__(self, key: str, size: int, max_tokens: int = MAX_TOKENS, folder: Path | None = None) -> None:
        self.path = (folder or texts_folder()) / f"learnt-{key}.npz"
        self._size, self._max_tokens = size, max_tokens

    def read(self) -> list[TokenIds]:
        """All stored answers (each [n]), oldest first; empty if the file cannot be read, which is logged."""
        if not exists(self.path):
            return []
        try:
            ids = checked_ids(self.path, read_arrays(self.path, "ids")[0], END_OF_TEXT, self._size)
        except StateError as exc:
            logger.warning("earlier answers are not used for drafting: %s", exc)
            return []
        return [part[:-1] for part in np.split(ids, np.flatnonzero(ids == END_OF_TEXT) + 1)[:-1]]

    def add(self, token_ids: TokenIds) -> None:
        """Store an answer [n], which is then the latest one. Failures are logged, never raised."""
        token_ids = token_ids[:MAX_ANSWER_TOKENS].astype(np.int32)
        if token_ids.size < _LEAST_TOKENS:
            return
        if not exists(self.path):
            logger.info("learning from answers: on, file %s (edgespec corpus rm --learnt deletes it)", self.path)
        newest_first = [token_ids, *(ids for ids in reversed(self.read()) if not np.array_equal(ids, token_ids))]
        sizes = accumulate(ids.size for ids in newest_first)
        kept = [ids for ids, size in zip(newest_first, sizes, strict=True) if size <= self._max_tokens]
        try:
            write_arrays(self.path, durable=False, ids=joined(kept[::-1]))
        except StateError as exc:
            logger.warning("this answer was not stored: %s", exc)

    def clear(self) -> bool:
        """Delete all answers; returns False if there were none. Raises StateError."""
        return remove(self.path)

"""The corpus: the user's own documents and code as token ids of one vocabulary, with a suffix index, stored on disk.

Text files and folders of them are read; files that are not text are skipped and counted. A folder for each vocabulary
holds a file per text, the size limit, and the index of all texts, which is made again where it is not theirs. All of it
is read into memory, not memory-mapped: if another program truncated a mapped file, the process would crash. The corpus
therefore has a size limit in bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edgespec.corpus.index import BYTES_PER_TOKEN, SuffixIndex, joined, sorted_places
from edgespec.corpus.store import DamagedError, checked_ids, read_arrays, remove, texts_folder, write_arrays
from edgespec.errors import ConfigError, StateError
from edgespec.platform.files import exists, is_file, is_folder, write_atomically
from edgespec.types import TokenIds

logger = logging.getLogger("edgespec")
MAX_FILE_BYTES = 32 << 20
_SNIFFED_BYTES = 8192
DEFAULT_BUDGET_BYTES = 64 << 20
MAX_BUDGET_BYTES = 4 << 30
MAX_NAME_LENGTH = 100
_MIB = 1 << 20
_INDEX, _BUDGET = "index.npz", "budget.json"


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
    """The corpus for one vocabulary: `key` as `vocabulary_key` gives it, `size` ids. `path`: its folder."""

    def __init__(self, key: str, size: int, folder: Path | None = None) -> None:
        self.path = (folder or texts_folder()) / f"corpus-{key}"
        self._size = size

    def texts(self) -> list[CorpusText]:
        """All texts, sorted by name. Raises StateError if one of them cannot be read."""
        return sorted(_described(path, read_arrays(path, "about")[0].tobytes()) for path in self._files())

    def budget_bytes(self) -> int:
        """Size limit of all texts together, in bytes."""
        try:
            return msgspec.json.decode((self.path / _BUDGET).read_bytes(), type=int)
        except (OSError, msgspec.DecodeError):
            return DEFAULT_BUDGET_BYTES

    def add(self, name: str, source: str, documents: list[TokenIds], budget_bytes: int | None = None) -> CorpusText:
        """Store `documents` (each [n]) under `name`, replacing what the same source gave before.

        `budget_bytes`: new size limit of the corpus. Raises ConfigError if the name is not valid or is taken, or the
        limit would be exceeded; StateError if the file cannot be written. The corpus is then unchanged.
        """
        check_name(name)
        others, ids = self.texts(), joined(documents)
        text = CorpusText(name, source, time.time(), len(documents), ids.size)
        taken = next((other for other in others if other.name == name), None)
        if taken is not None and taken.source != source:
            raise ConfigError(
                f"the corpus already has a text {name!r}, from {taken.source}: give this one another name with --name"
            )
        check_budget(text, others, budget_bytes or self.budget_bytes())
        about = np.frombuffer(json.dumps(text).encode(), np.uint8)
        write_arrays(self._file_of(name), about=about, ids=ids)
        if budget_bytes is not None:
            write_atomically(self.path / _BUDGET, str(budget_bytes), private=True)
        try:
            self.index()  # sorted now, so that the next load need not
        except StateError as exc:  # of another text: this one is stored
            logger.warning("%s", exc)
        return text

    def remove(self, name: str) -> CorpusText:
        """Remove a text. Raises ConfigError if there is no such text, StateError if its file cannot be deleted."""
        known = {text.name: text for text in self.texts()}
        if name not in known:
            raise ConfigError(f"the corpus has no {name!r}; it has: {', '.join(known) or 'nothing'}")
        remove(self._file_of(name))
        return known[name]

    def clear(self) -> bool:
        """Delete the corpus, damaged or not; returns False if there was none. Raises StateError."""
        files = [*self._files(), self.path / _INDEX, self.path / _BUDGET]
        return sum(map(remove, files)) > 0

    def index(self) -> SuffixIndex | None:
        """The suffix index of all texts; None if there are none.

        Raises StateError if a text is damaged or of another vocabulary, or the size limit is exceeded.
        """
        texts = self.texts()
        if not texts:
            return None
        total, budget = sum(text.num_bytes for text in texts), self.budget_bytes()
        if total > budget:
            raise StateError(f"the corpus takes {total / _MIB:.1f} MiB and its budget is {budget / _MIB:.1f} MiB")
        ids = np.concatenate([self._ids_of(text) for text in texts])
        return SuffixIndex(ids, self._order(ids)) if ids.size else None

    def _order(self, ids: TokenIds) -> TokenIds:
        """The suffix array [n] of all texts: the stored one where it is theirs."""
        path, signature = self.path / _INDEX, np.frombuffer(hashlib.sha256(ids.tobytes()).digest(), np.uint8)
        try:
            stored, order = read_arrays(path, "signature", "order")
            if np.array_equal(stored, signature) and order.size == ids.size:
                return checked_ids(path, order, 0, ids.size)
        except StateError:
            pass
        order = sorted_places(ids)
        try:
            write_arrays(path, signature=signature, order=order)
        except StateError as exc:
            logger.debug("the index of the corpus was not saved: %s", exc)
        return order

    def _files(self) -> list[Path]:
        return [path for path in self.path.glob("*.npz") if path.name != _INDEX]

    def _file_of(self, name: str) -> Path:
        return self.path / f"{hashlib.sha256(name.encode()).hexdigest()[:20]}.npz"

    def _ids_of(self, text: CorpusText) -> TokenIds:
        """The token ids [n] of a text. Raises StateError."""
        path = self._file_of(text.name)
        ids = checked_ids(path, read_arrays(path, "ids")[0], -1, self._size)
        if ids.size != text.num_tokens:
            raise DamagedError(path, "it holds another text than it says")
        return ids


def _described(path: Path, about: bytes) -> CorpusText:
    try:
        return msgspec.json.decode(about, type=CorpusText)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise DamagedError(path, str(exc)) from exc


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

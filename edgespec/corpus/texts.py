"""Texts to draft from, as token ids of one vocabulary: the user's corpus, common texts, and earlier answers.

They are .npz archives in the user's data folder (common texts: in the cache folder), readable by the user only. Each is
written whole and atomically, so that processes, kills and full disks leave the old file or the new one; of two that
write at once the later one wins, and the archive's own checksums tell damage. They are read into memory, not
memory-mapped: if another program truncated a mapped file, the process would crash. Hence the limit of their size.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgespec.corpus.index import BYTES_PER_TOKEN, END_OF_TEXT, SuffixIndex, joined, sorted_places
from edgespec.errors import ConfigError, StateError
from edgespec.platform.disk_cache import key_of
from edgespec.platform.files import exists, is_file, is_folder, shipped_models, user_folder, write_atomically
from edgespec.types import TokenIds
from edgespec.vocabulary import Vocabulary

logger = logging.getLogger("edgespec")
MAX_FILE_BYTES = 32 << 20
MAX_BYTES = 256 << 20  # of all texts together, with their index
MAX_NAME_LENGTH = 100
MAX_TOKENS = 1 << 18  # of all stored answers
MAX_ANSWER_TOKENS = 1 << 14
_LEAST_TOKENS = 4  # shorter answers are not stored
# Of the common texts:
_LEAST_VOCABULARY = 1 << 14  # a smaller one, such as the demo's, is of a model that writes about something else
_BLOCK = 100_000  # characters encoded at once; other threads run meanwhile
_SAMPLED = 256  # tokens that tell vocabularies apart; taking one for another would make bad drafts and nothing else


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
    except Exception as exc:  # numpy, zipfile and its decompressors raise nearly everything of damaged bytes
        raise DamagedError(path, str(exc)) from exc


def checked_ids(path: Path, token_ids: NDArray[Any], least: int, size: int) -> TokenIds:
    """The token ids [n] that `path` holds. Raises DamagedError unless all are within `least`..size - 1."""
    if token_ids.dtype != np.int32 or token_ids.ndim != 1:
        raise DamagedError(path, "it holds no list of token ids")
    if token_ids.size and not (token_ids.min() >= least and token_ids.max() < size):
        raise DamagedError(path, f"a token id is outside {least}..{size - 1}")
    return token_ids


def read_index(path: Path, size: int) -> SuffixIndex:
    """The index of the arrays `ids` and `order` in a file. Raises StateError if it is damaged or cannot be opened."""
    ids, order = read_arrays(path, "ids", "order")
    if ids.size != order.size:
        raise DamagedError(path, "its index is of other texts")
    return SuffixIndex(checked_ids(path, ids, END_OF_TEXT, size), checked_ids(path, order, 0, ids.size))


def remove(path: Path) -> bool:
    """Delete a file; returns False if there was none. Raises StateError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise StateError(f"{path} cannot be deleted: {exc.strerror}; delete it by hand") from exc
    return True


class Documents:
    """The text files at or below `path`, read one by one; `num_left_out` counts files and folders that were skipped.

    Raises ConfigError if `path` does not exist, or is a file that cannot be read or is not text.
    """

    def __init__(self, path: Path) -> None:
        if not exists(path):
            raise ConfigError(f"no file or folder {str(path)!r}: give a text file or a folder of text files")
        self.path = path
        self.num_left_out = 0

    def __iter__(self) -> Iterator[str]:
        """The texts, sorted by name. Skips hidden files and folders, and links."""
        if not is_folder(self.path):
            if not (text := _text_in(self.path)):
                raise ConfigError(f"{self.path} holds no text: give a file of text in UTF-8, of at most 32 MiB")
            yield text
            return
        for folder, subfolders, names in os.walk(self.path, onerror=self._leave_out):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                file = Path(folder) / name
                if not file.is_symlink() and (text := _text_in(file)):
                    yield text
                else:
                    self._leave_out()

    def _leave_out(self, error: OSError | None = None) -> None:
        self.num_left_out += 1


def _text_in(path: Path) -> str:
    """The text of a file; empty for one that cannot be read, is too large, or holds no text in UTF-8."""
    try:
        contents = path.read_bytes() if is_file(path) and path.stat().st_size <= MAX_FILE_BYTES else b""
        text = "" if b"\0" in contents else contents.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return ""
    return text if text.strip() else ""


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
    """The corpus for one vocabulary: `key` as `vocabulary_key` gives it, `size` ids. `path`: its file."""

    def __init__(self, key: str, size: int, folder: Path | None = None) -> None:
        self.path = (folder or texts_folder()) / f"corpus-{key}.npz"
        self._size = size

    def texts(self) -> list[CorpusText]:
        """All texts, sorted by name. Raises StateError if the file cannot be read."""
        if not exists(self.path):
            return []
        try:
            return msgspec.json.decode(read_arrays(self.path, "about")[0].tobytes(), type=list[CorpusText])
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise DamagedError(self.path, str(exc)) from exc

    def add(self, name: str, source: str, documents: Sequence[TokenIds]) -> CorpusText:
        """Store `documents` (each [n]) under `name`, replacing what the same source gave before.

        Raises ConfigError if the name is not valid or is taken, or the corpus would be too large; StateError if the
        file cannot be written. The corpus is then unchanged.
        """
        check_name(name)
        parts, ids = self._parts(), joined(documents)
        taken = next((text for text in parts if text.name == name), None)
        if taken is not None and taken.source != source:
            raise ConfigError(
                f"the corpus already has a text {name!r}, from {taken.source}: give this one another name with --name"
            )
        added = CorpusText(name, source, time.time(), len(documents), ids.size)
        parts = {text: part for text, part in parts.items() if text.name != name} | {added: ids}
        check_size(source, sum(text.num_tokens for text in parts))
        self._write(parts)
        return added

    def remove(self, name: str) -> CorpusText:
        """Remove a text. Raises ConfigError if there is no such text, StateError if the file cannot be written."""
        parts = self._parts()
        found = next((text for text in parts if text.name == name), None)
        if found is None:
            known = ", ".join(text.name for text in parts) or "nothing"
            raise ConfigError(f"the corpus has no {name!r}; it has: {known}")
        del parts[found]
        self._write(parts) if parts else self.clear()
        return found

    def clear(self) -> bool:
        """Delete the corpus, damaged or not; returns False if there was none. Raises StateError."""
        return remove(self.path)

    def index(self) -> SuffixIndex | None:
        """The suffix index of all texts; None if there are none. Raises StateError if the file is damaged."""
        return read_index(self.path, self._size) if exists(self.path) else None

    def _parts(self) -> dict[CorpusText, TokenIds]:
        """The token ids [n] of each text."""
        if not (texts := self.texts()):
            return {}
        ids = checked_ids(self.path, read_arrays(self.path, "ids")[0], END_OF_TEXT, self._size)
        ends = np.cumsum([text.num_tokens for text in texts])
        return dict(zip(texts, np.split(ids, ends[:-1]), strict=True))

    def _write(self, parts: dict[CorpusText, TokenIds]) -> None:
        texts = sorted(parts)
        ids = np.concatenate([parts[text] for text in texts])
        about = np.frombuffer(msgspec.json.encode(texts), np.uint8)
        write_arrays(self.path, about=about, ids=ids, order=sorted_places(ids))


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is printable, on one line and not an option."""
    if not (0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() and name == name.strip()) or name.startswith("-"):
        raise ConfigError(
            f"{name!r} is not a valid name: give 1..{MAX_NAME_LENGTH} printable characters without a '-' in front with "
            "--name"
        )


def check_size(source: str, num_tokens: int) -> None:
    """Raise ConfigError if a corpus of so many tokens, with those of `source`, would be too large."""
    if num_tokens * BYTES_PER_TOKEN > MAX_BYTES:
        raise ConfigError(
            f"with {source} the corpus would take more than {MAX_BYTES >> 20} MiB, {BYTES_PER_TOKEN} bytes a token: "
            "add less, or free space with edgespec corpus rm NAME"
        )


class CommonTexts:
    """Texts that come with edgespec: what models usually write. Small models wrote them (models/texts/NOTICE).

    `index`: of them in the vocabulary; None until `encode` made it, in this run or an earlier one.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.index: SuffixIndex | None = None
        self._source, self._size = shipped_models() / "texts" / "texts.txt.gz", vocabulary.size
        self._is_wanted = self._size >= _LEAST_VOCABULARY and exists(self._source)
        if self._is_wanted:
            names = [vocabulary.token_name(token_id) for token_id in range(0, self._size, self._size // _SAMPLED)]
            key = key_of(self._source.stat().st_size, self._size, names)
            self._path = user_folder("cache") / "common texts" / f"{key}.npz"
            with suppress(StateError):  # of a damaged file, which is written anew
                if exists(self._path):
                    self.index, self._is_wanted = read_index(self._path, self._size), False

    def begin(self) -> bool:
        """Whether `encode` is to be called, which is true once."""
        is_wanted, self._is_wanted = self._is_wanted, False
        return is_wanted

    def encode(self, vocabulary: Vocabulary, is_busy: Callable[[], bool]) -> None:
        """Encode the texts and keep them: one to three seconds of a core, in parts of a twentieth, while not `is_busy`.

        Raises what `vocabulary` does.
        """
        parts = list[TokenIds]()
        with gzip.open(self._source, "rt", encoding="utf-8") as source:
            while block := source.read(_BLOCK):
                while is_busy():
                    time.sleep(0.02)
                parts.append(np.array(vocabulary.encode(block), np.int32))
        order = sorted_places(ids := np.concatenate(parts))
        self.index = SuffixIndex(ids, order)
        try:
            write_arrays(self._path, durable=False, ids=ids, order=order)
        except StateError as exc:
            logger.debug("the encoded texts are not kept: %s", exc)


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

"""Texts and conversations to learn from, read from files. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from edgespec.errors import ConfigError

PIECE_CHARACTERS = 8192  # longer texts are cut into documents of this size
HELD_OUT_FRACTION = 0.1
Message = dict[str, Any]
Document = str | list[Message]


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """All documents of `paths`, each once, in an order that does not depend on that of the files.

    `*.jsonl` and `*.jsonl.xz` have one object per line, with "text", "messages" or "prompt" (a single message of a
    user); any other file is one text. Raises ConfigError that names the file and the line.
    """
    found: dict[bytes, Document] = {}
    for path in paths:
        try:
            found |= {_key(document): document for document in _documents_of(path)}
        except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError) as exc:
            raise ConfigError(f"--data {path} cannot be read: {exc}") from exc
    return [found[key] for key in sorted(found)]


def split_held_out(documents: Sequence[Document], most: int) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents. Raises ConfigError if there are fewer than two."""
    if len(documents) < 2:
        raise ConfigError("--data has one document; at least two are needed, one of them to measure acceptance on")
    count = max(1, min(most, round(len(documents) * HELD_OUT_FRACTION)))
    return list(documents[count:]), list(documents[:count])


def _key(document: Document) -> bytes:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()


def _documents_of(path: Path) -> Iterator[Document]:
    if not path.name.endswith((".jsonl", ".jsonl.xz")):
        yield from _pieces(path.read_text(encoding="utf-8-sig"))
        return
    with _opened(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield from _documents_of_line(line, f"--data {path} line {number}")


def _opened(path: Path) -> IO[str]:
    return lzma.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".xz" else path.open(encoding="utf-8-sig")


def _documents_of_line(line: str, place: str) -> Iterator[Document]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{place} is not JSON: {exc}") from exc
    text, messages, prompt = (record.get(key) if isinstance(record, dict) else None for key in _KEYS)
    if isinstance(text, str):
        yield from _pieces(text)
    elif isinstance(messages, list) and all(isinstance(each, dict) and "role" in each for each in messages):
        yield messages
    elif isinstance(prompt, str):
        yield [{"role": "user", "content": prompt}]
    else:
        raise ConfigError(f'{place} has no "text", "messages" (a list of objects with roles) or "prompt"')


_KEYS = ("text", "messages", "prompt")


def _pieces(text: str) -> Iterator[str]:
    """Parts of at most PIECE_CHARACTERS, cut after a line break if possible."""
    start = 0
    while start < len(text):
        limit = start + PIECE_CHARACTERS
        end = text.rfind("\n", start + PIECE_CHARACTERS // 2, limit) + 1 if len(text) > limit else 0
        piece = text[start : (end or limit)]
        if piece.strip():
            yield piece
        start = end or limit

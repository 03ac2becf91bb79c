"""The training texts of a distillation: plain text files, or JSON lines of texts or conversations.

Documents are rendered and encoded only when a prompt or window is drawn, so large data sets cause no delay. Does not
need torch.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.chat.messages import checked_messages
from edgespec.chat.template import render_chat
from edgespec.errors import ConfigError, PromptError
from edgespec.export.training.target import TargetFacts

PIECE_CHARACTERS = 8192  # longer texts are cut into documents of this size
MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
HELD_OUT_FRACTION = 0.1
MAX_REFUSALS = 100
Encode = Callable[[str, bool], list[int]]  # (text, whether to add the begin token)


@dataclass(frozen=True)
class Document:
    """A text, or a conversation if `messages` is not empty."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def key(self) -> bytes:
        """A hash of the content; its order does not depend on the order of the files."""
        content = json.dumps(self.messages, sort_keys=True) if self.messages else self.text
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """All documents of `paths`, without duplicates. Raises ConfigError, naming the file and the line.

    `*.jsonl` and `*.jsonl.xz` have one object per line, with "text" or "messages"; any other file is one text.
    """
    found: dict[bytes, Document] = {}
    for path in paths:
        before = len(found)
        try:
            for document in _documents_of(path):
                found.setdefault(document.key, document)
        except (OSError, lzma.LZMAError, EOFError) as exc:
            reason = getattr(exc, "strerror", None) or exc
            raise ConfigError(f"--data {path} cannot be read: {reason}") from exc
        except UnicodeDecodeError as exc:
            raise ConfigError(f"--data {path} is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc
        if len(found) == before:
            raise ConfigError(f"--data {path} adds no document (empty, or all are in an earlier file): omit it")
    return list(found.values())


def _documents_of(path: Path) -> Iterator[Document]:
    if path.name.endswith((".jsonl", ".jsonl.xz")):
        with _opened(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield from _documents_of_record(line, f"--data {path} line {number}")
    else:
        yield from _pieces(path.read_text(encoding="utf-8-sig"))


def _opened(path: Path) -> IO[str]:
    return lzma.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".xz" else path.open(encoding="utf-8-sig")


def _documents_of_record(line: str, place: str) -> Iterator[Document]:
    try:
        record = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(record, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{place} is not valid Unicode: {exc}") from exc
    except (ValueError, RecursionError) as exc:  # ValueError: also a whole number of too many digits
        raise ConfigError(f"{place} is not JSON: {exc}") from exc
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        yield from _pieces(record["text"])
    elif isinstance(record, dict) and isinstance(record.get("messages"), list):
        yield Document(messages=_usable_messages(record["messages"], place))
    else:
        raise ConfigError(f'{place} has neither a "text" (a string) nor "messages" (a list)')


def _usable_messages(messages: list[Any], place: str) -> tuple[dict[str, Any], ...]:
    """The messages with only the keys that chat templates use. Raises ConfigError."""
    if not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{place} has a message that is not an object")
    kept = [{key: message[key] for key in MESSAGE_KEYS if key in message} for message in messages]
    try:
        return tuple(checked_messages(kept))
    except PromptError as exc:
        raise ConfigError(f"{place}: {exc}") from exc


def _pieces(text: str) -> Iterator[Document]:
    """Documents of at most PIECE_CHARACTERS, cut after a line break if possible."""
    start = 0
    while start < len(text):
        limit = start + PIECE_CHARACTERS
        end = text.rfind("\n", start + PIECE_CHARACTERS // 2, limit) + 1 if len(text) > limit else 0
        piece = text[start : (end or limit)]
        if piece.strip():
            yield Document(piece)
        start = end or limit


def split_held_out(documents: Sequence[Document], at_most: int) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents, split by hash, so that the order of the files does not matter.

    Raises ConfigError if there are fewer than two.
    """
    if len(documents) < 2:
        raise ConfigError("--data has one document; at least two are needed, one of them to measure acceptance on")
    ordered = sorted(documents, key=lambda document: document.key)
    count = max(1, min(at_most, round(len(ordered) * HELD_OUT_FRACTION)))
    return ordered[count:], ordered[:count]


class Corpus:
    """Draws prompts and windows of token ids, determined by the documents and the random generator."""

    def __init__(self, documents: Sequence[Document], target: TargetFacts, encode: Encode) -> None:
        self.documents, self._target, self._encode = documents, target, encode

    def _render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        text = render_chat(
            self._target.chat_template or "",
            messages,
            bos_token=self._target.special_tokens.get("bos_token", ""),
            eos_token=self._target.special_tokens.get("eos_token", ""),
            add_generation_prompt=add_generation_prompt,
        )
        return self._encode(text, False)

    def _text_ids(self, text: str) -> list[int]:
        ids, begin = self._encode(text, True), self._target.begin_id
        return ids if begin is None or ids[:1] == [begin] else [begin, *ids]

    def _draw(self, rng: np.random.Generator, use: Callable[[Document], list[int]], least: int) -> list[int]:
        """`use` of a random document that gives at least `least` tokens; skips conversations that the template rejects.

        Raises ConfigError after MAX_REFUSALS attempts.
        """
        reason = "they are all too short"
        for _ in range(MAX_REFUSALS):
            document = self.documents[int(rng.integers(len(self.documents)))]
            try:
                ids = use(document)
            except PromptError as exc:
                reason = str(exc)
                continue
            if len(ids) >= least:
                return ids
        raise ConfigError(f"--data: {MAX_REFUSALS} documents in a row cannot be used: {reason}")

    def prompt(self, rng: np.random.Generator, max_tokens: int) -> list[int]:
        """The last `max_tokens` tokens of a conversation up to one of its answers, or of the beginning of a text."""

        def use(document: Document) -> list[int]:
            if document.messages:
                answers = [i for i, m in enumerate(document.messages) if i and m["role"] == "assistant"]
                end = int(rng.choice(answers)) if answers else len(document.messages)
                return self._render(document.messages[:end], add_generation_prompt=True)
            ids = self._text_ids(document.text)
            return ids[: int(rng.integers(1, max(2, min(len(ids), max_tokens))))]

        return self._draw(rng, use, 1)[-max_tokens:]

    def window(self, rng: np.random.Generator, length: int) -> NDArray[np.int32]:
        """Token ids [length] of consecutive documents; a longer document starts at a random position."""

        def use(document: Document) -> list[int]:
            if document.messages:
                return self._render(document.messages, add_generation_prompt=False)
            return self._text_ids(document.text)

        found: list[int] = []
        while len(found) < length:
            ids = self._draw(rng, use, 2)
            start = int(rng.integers(0, max(1, len(ids) - length + 1)))
            found += ids[start : start + length - len(found)]
        return np.asarray(found, np.int32)

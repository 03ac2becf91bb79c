"""Control tokens that a text spells out, as text: characters that stand for them while a chat template renders it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from edgespec.chat.marks import PRINTED_MARKS
from edgespec.vocabulary import Vocabulary

_BAR = "|\N{FULLWIDTH VERTICAL LINE}"
_MARK = re.compile(f"<[{_BAR}].+[{_BAR}]>")


def printed_marks(vocabulary: Vocabulary) -> list[str]:
    """Tokens that have the form of a mark of turns and print themselves, as DeepSeek R1's do."""
    return [name for name in vocabulary.printed_names if _MARK.fullmatch(name)]


def as_text(vocabulary: Vocabulary, mark: str) -> list[int]:
    """Token ids that spell a mark and are not its token."""
    ids = vocabulary.encode(mark)
    prints = mark in PRINTED_MARKS or mark in vocabulary.printed_names
    is_unknown = max(ids, default=0) >= vocabulary.size  # behind the vocabulary
    if is_unknown or (prints and len(ids) == 1 and vocabulary.token_name(ids[0]) == mark):
        return vocabulary.encode(mark[:1]) + vocabulary.encode(mark[1:])
    return ids


def texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in (*value, *value.values()):
            yield from texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts(each)


def replaced(value: Any, stand_ins: Mapping[str, str]) -> Any:
    """A JSON value with `stand_ins` in place of marks in every text of it."""
    if isinstance(value, str):
        for mark, stand_in in stand_ins.items():
            value = value.replace(mark, stand_in)
        return value
    if isinstance(value, Mapping):
        return {replaced(key, stand_ins): replaced(each, stand_ins) for key, each in value.items()}
    return [replaced(each, stand_ins) for each in value] if isinstance(value, list | tuple) else value


def unused_characters(count: int, text: str) -> list[str]:
    """Private-use characters (from U+F0000) that do not occur in `text`."""
    used = set(text)
    free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
    return [next(free) for _ in range(count)]

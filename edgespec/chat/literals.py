"""Values in tool calls that are not quite JSON: Python's, and Gemma 4's, which has a mark for quotation marks.

Written by models, so anything may stand there: whatever is no value is a ValueError and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from edgespec.chat.spelling import DECODER, as_written

_MOST_DEPTH = 64
_BLANKS = re.compile(r"\s*")
_KEY = re.compile(r"""\s*([^\s:{}\[\],"'<>](?:[^:{}\[\],"'<>]{0,198}[^\s:{}\[\],"'<>])?)\s*:""")
_WORD = re.compile(r"(?:True|true|False|false|None|null)\b")
_NUMBER = re.compile(r"[-+]?\d{1,400}(?:\.\d{1,400})?(?:[eE][-+]?\d{1,3})?")
_WORDS: dict[str, Any] = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_ESCAPED = re.compile(r"""\\([\\'"nrt])""")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def dumped(value: object) -> str:
    """JSON text that can be sent, numbers as they were spelled. Raises ValueError for those that JSON does not have."""
    try:
        text = as_written(value, partial(json.dumps, ensure_ascii=False, allow_nan=False))
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        return as_written(value, partial(json.dumps, allow_nan=False))
    return text


def behind_blanks(text: str, at: int) -> int:
    """The place of the first letter from `at` on that is no blank."""
    found = _BLANKS.match(text, at)
    return at if found is None else found.end()


def written_value(value: object, quote: str) -> str:
    """A value as Gemma 4 writes it: `quote` around texts, keys bare."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{written_value(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(written_value(each, quote) for each in value) + "]"
    return json.dumps(value)


def parsed(text: str, quote: str = "") -> Any:
    """The value that `text` is. Raises ValueError if it is none."""
    value, end = ValueReader(text, quote).value(0)
    if text[end:].strip():
        raise ValueError("more than a value")
    return value


class ValueReader:
    """Reads values from a place on; each method returns (value, where it ends) and raises ValueError.

    Texts stand between quotation marks as in JSON, between apostrophes, of which those that end no value belong to the
    text, or between `quote`.
    """

    def __init__(self, text: str, quote: str = "") -> None:
        self._text, self._quote = text, quote

    def value(self, at: int, depth: int = 0) -> tuple[Any, int]:
        if depth > _MOST_DEPTH:
            raise ValueError("nested too deeply")
        at = behind_blanks(self._text, at)
        if self._quote and self._text.startswith(self._quote, at):
            return self._quoted(at)
        begin = self._text[at : at + 1]
        if begin == "{":
            return self._object(at + 1, depth + 1)
        if begin == "[":
            return self._list(at + 1, depth + 1)
        if begin == "'":
            return self._between_apostrophes(at + 1)
        if begin == '"':
            return DECODER.raw_decode(self._text, at)
        return self._word_or_number(at)

    def behind_comma(self, closing: str, at: int) -> int:
        """The place behind a comma, or of `closing`."""
        at = behind_blanks(self._text, at)
        if self._text.startswith(",", at):
            return at + 1
        if not self._text.startswith(closing, at):
            raise ValueError("neither a comma nor the end")
        return at

    def is_over(self, closing: str, at: int) -> bool:
        return self._text.startswith(closing, behind_blanks(self._text, at))

    def _word_or_number(self, at: int) -> tuple[Any, int]:
        word = _WORD.match(self._text, at)
        if word is not None:
            return _WORDS[word[0]], word.end()
        number = _NUMBER.match(self._text, at)
        if number is None:
            raise ValueError("no value")
        return DECODER.decode(number[0].removeprefix("+")), number.end()

    def _quoted(self, at: int) -> tuple[str, int]:
        begin = at + len(self._quote)
        end = self._text.index(self._quote, begin)
        return self._text[begin:end], end + len(self._quote)

    def _between_apostrophes(self, begin: int) -> tuple[str, int]:
        end = self._text.index("'", begin)
        while not self._ends_text(begin, end):
            end = self._text.index("'", end + 1)
        text = _ESCAPED.sub(lambda found: _ESCAPES.get(found[1], found[1]), self._text[begin:end])
        return text, end + 1

    def _ends_text(self, begin: int, at: int) -> bool:
        """Whether the apostrophe `at` ends the text from `begin` on: before what ends values, not after a backslash."""
        num_backslashes = at - len(self._text[begin:at].rstrip("\\")) - begin
        after = behind_blanks(self._text, at + 1)
        return num_backslashes % 2 == 0 and (after == len(self._text) or self._text[after] in ",)]}:")

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found = dict[str, Any]()
        while not self.is_over("}", at):
            key, at = self._key(at)
            found[key], at = self.value(at, depth)
            at = self.behind_comma("}", at)
        return found, behind_blanks(self._text, at) + 1

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        found = list[Any]()
        while not self.is_over("]", at):
            value, at = self.value(at, depth)
            found.append(value)
            at = self.behind_comma("]", at)
        return found, behind_blanks(self._text, at) + 1

    def _key(self, at: int) -> tuple[str, int]:
        at = behind_blanks(self._text, at)
        bare = _KEY.match(self._text, at)
        if bare is not None:
            return bare[1], bare.end()
        key, at = self.value(at, _MOST_DEPTH)
        at = behind_blanks(self._text, at)
        if not isinstance(key, str) or not self._text.startswith(":", at):
            raise ValueError("no key")
        return key, at + 1

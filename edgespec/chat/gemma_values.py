"""Values in Gemma 4's tool calls: JSON with a mark in place of quotation marks, and bare keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

ParsedValue = dict[str, Any] | None
_MOST_DEPTH = 64
_KEY = re.compile(r'\s*([^\s:{}\[\],"<>]+)\s*:')
_BLANKS = re.compile(r"\s*")


def written_value(value: object, quote: str) -> str:
    """A value as the model writes it: `quote` around texts, keys bare."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{written_value(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(written_value(each, quote) for each in value) + "]"
    return json.dumps(value)


def parsed_arguments(text: str, quote: str) -> ParsedValue:
    """The object that `text` is; None if it is anything else. Texts may stand between `quote` or as in JSON."""
    try:
        value, end = _Reader(text, quote).value(0, 0)
    except ValueError:
        return None
    return value if isinstance(value, dict) and not text[end:].strip() else None


class _Reader:
    """Reads values from a place on; each method returns (value, where it ends) and raises ValueError."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote = text, quote
        self._json = json.JSONDecoder()

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        if depth > _MOST_DEPTH:
            raise ValueError("nested too deeply")
        at = self._behind_blanks(at)
        if self._text.startswith(self._quote, at):
            return self._quoted(at)
        if self._text.startswith("{", at):
            return self._object(at + 1, depth + 1)
        if self._text.startswith("[", at):
            return self._list(at + 1, depth + 1)
        return self._json.raw_decode(self._text, at)

    def _quoted(self, at: int) -> tuple[str, int]:
        begin = at + len(self._quote)
        end = self._text.index(self._quote, begin)
        return self._text[begin:end], end + len(self._quote)

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found = dict[str, Any]()
        while not self._is_over("}", at):
            key, at = self._key(at)
            found[key], at = self.value(at, depth)
            at = self._behind_comma("}", at)
        return found, self._behind_blanks(at) + 1

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        found = list[Any]()
        while not self._is_over("]", at):
            value, at = self.value(at, depth)
            found.append(value)
            at = self._behind_comma("]", at)
        return found, self._behind_blanks(at) + 1

    def _key(self, at: int) -> tuple[str, int]:
        at = self._behind_blanks(at)
        bare = _KEY.match(self._text, at)
        if bare is not None:
            return bare[1], bare.end()
        key, at = self.value(at, _MOST_DEPTH)
        at = self._behind_blanks(at)
        if not isinstance(key, str) or not self._text.startswith(":", at):
            raise ValueError("no key")
        return key, at + 1

    def _is_over(self, closing: str, at: int) -> bool:
        return self._text.startswith(closing, self._behind_blanks(at))

    def _behind_comma(self, closing: str, at: int) -> int:
        at = self._behind_blanks(at)
        if self._text.startswith(",", at):
            return at + 1
        if not self._text.startswith(closing, at):
            raise ValueError("neither a comma nor the end")
        return at

    def _behind_blanks(self, at: int) -> int:
        found = _BLANKS.match(self._text, at)
        return at if found is None else found.end()

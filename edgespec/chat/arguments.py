"""Arguments of tool calls, read as models write them and written as JSON: JSON with slips, Python's, and Gemma 4's.

Anything may stand there: whatever is no value is a ValueError and nothing else. What is JSON keeps its spelling. A
tool's schema says which value a text without marks is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from edgespec.chat.messages import JSON

_MOST_DEPTH = 64
_BLANKS = re.compile(r"\s*")
_NO_KEY = {":": r":{}\[\],\"'<>", "=": r"=(),\[\]{}'\""}  # by what stands behind a bare key
_KEYS = {colon: re.compile(rf"([^\s{no}](?:[^{no}]{{0,198}}[^\s{no}])?)\s*{colon}") for colon, no in _NO_KEY.items()}
_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_WORD = re.compile(rf"(?:{'|'.join(_WORDS)})\b")
_NUMBER = re.compile(r"\+?(-?)0*(\d{1,400})(\.\d{0,400})?([eE][-+]?\d{1,3})?")
_TEXT = re.compile(r'"(?:[^"\\]+|\\.)*+"', re.DOTALL)
_ESCAPED = re.compile(r"""\\([\\'"nrt])""")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def dumped(value: object, separators: tuple[str, str] | None = None) -> str:
    """JSON text that can be sent. Raises ValueError for numbers that JSON does not have."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        return json.dumps(value, allow_nan=False, separators=separators)
    return text


_WITH_LINE_ENDS = json.JSONDecoder(strict=False)


def loaded(text: str) -> Any:
    """The JSON value that `text` is; raises ValueError if it is none."""
    try:
        return JSON.decode(text)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


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


def as_json(text: str) -> str:
    """The value that `text` is as JSON. Raises ValueError if it is none."""
    value, end = ValueReader(text).value(0)
    if text[end:].strip():
        raise ValueError("more than a value")
    return value


class ValueReader:
    """Reads values from a place on; each method returns (JSON, where the value ends).

    Texts stand between quotation marks as in JSON, where line ends may stand too, between apostrophes, of which those
    that end no value belong to the text, or between `quote`. `is_json`: it should be JSON. `doubles`: braces may be
    doubled, as in a template of Python. Raises ValueError for what is no value, or none yet.
    """

    def __init__(self, text: str, quote: str = "", *, is_json: bool = True, doubles: bool = False) -> None:
        self._text, self._quote, self._is_json, self._doubles = text, quote, is_json, doubles
        self.end = 0  # behind the object whose `members` were read last

    def value(self, at: int, depth: int = 0) -> tuple[str, int]:
        text, at = self._text, behind_blanks(self._text, at)
        if self._begins_quote(at):
            return self._up_to(self._quote, at + len(self._quote))
        with suppress(ValueError, RecursionError):
            if self._is_json:
                end = JSON.raw_decode(text, at)[1]
                return text[at:end], end
        begin = text[at : at + 1]
        if depth > _MOST_DEPTH:
            raise ValueError("nested too deeply")
        if begin == "{" and self._doubles and self.is_over("{", at + 1):
            value, at = self.value(at + 1, depth + 1)
            return value, self._behind("}", at)
        if begin == "{":
            return self.object(at + 1, depth=depth + 1)
        if begin == "[":
            return self._list(at + 1, depth + 1)
        if begin == "'":
            return self._between_apostrophes(at + 1)
        if begin == '"':
            return self._between_quotes(at)
        return self._word_or_number(at)

    def object(self, at: int, closing: str = "}", colon: str = ":", depth: int = 0) -> tuple[str, int]:
        """An object whose first member begins at `at`."""
        members = [f"{key}: {value}" for key, value, _ in self.members(at, closing, colon, depth)]
        return "{" + ", ".join(members) + "}", self.end

    def members(self, at: int, closing: str = "}", colon: str = ":", depth: int = 0) -> Iterator[tuple[str, str, int]]:
        """(key, value, where it ends) of each member from `at` on; keys may be bare."""
        while not self.is_over(closing, at):
            key, at = self._key(at, colon)
            value, at = self.value(at, depth)
            yield key, value, at
            at = self._behind_comma(closing, at)
        self.end = behind_blanks(self._text, at) + 1

    def _behind_comma(self, closing: str, at: int) -> int:
        """The place behind a comma, or of `closing`."""
        at = behind_blanks(self._text, at)
        if self._text.startswith(",", at):
            return at + 1
        if not self._text.startswith(closing, at):
            raise ValueError(f"{closing} is missing")
        return at

    def _begins_quote(self, at: int) -> bool:
        return bool(self._quote) and self._text.startswith(self._quote, at)

    def is_over(self, closing: str, at: int) -> bool:
        return self._text.startswith(closing, behind_blanks(self._text, at))

    def _behind(self, closing: str, at: int) -> int:
        at = behind_blanks(self._text, at)
        if not self._text.startswith(closing, at):
            raise ValueError(f"{closing} is missing")
        return at + 1

    def _word_or_number(self, at: int) -> tuple[str, int]:
        word = _WORD.match(self._text, at)
        if word is not None:
            return _WORDS[word[0]], word.end()
        number = _NUMBER.match(self._text, at)
        if number is None:
            raise ValueError("no value")
        sign, whole, fraction, exponent = number.groups(default="")
        spelled = f"{sign}{whole}{fraction}{'0' * (fraction == '.')}{exponent}"
        loaded(spelled)
        return spelled, number.end()

    def _up_to(self, mark: str, begin: int) -> tuple[str, int]:
        end = self._text.find(mark, begin)
        if end < 0:
            raise ValueError(f"{mark} is missing")
        return dumped(self._text[begin:end]), end + len(mark)

    def _between_quotes(self, at: int) -> tuple[str, int]:
        found = _TEXT.match(self._text, at)
        if found is None:
            raise ValueError("no end of a text")
        return dumped(_WITH_LINE_ENDS.decode(found[0])), found.end()

    def _between_apostrophes(self, begin: int) -> tuple[str, int]:
        end = self._text.find("'", begin)
        while end >= 0 and not self._ends_text(begin, end):
            end = self._text.find("'", end + 1)
        if end < 0:
            raise ValueError("no end of a text")
        text = _ESCAPED.sub(lambda found: _ESCAPES.get(found[1], found[1]), self._text[begin:end])
        return dumped(text), end + 1

    def _ends_text(self, begin: int, at: int) -> bool:
        """Whether the apostrophe `at` ends the text from `begin` on: before what ends values, not after a backslash."""
        num_backslashes = at - len(self._text[begin:at].rstrip("\\")) - begin
        after = behind_blanks(self._text, at + 1)
        return num_backslashes % 2 == 0 and (after == len(self._text) or self._text[after] in ",)]}:")

    def _list(self, at: int, depth: int) -> tuple[str, int]:
        values = list[str]()
        while not self.is_over("]", at):
            value, at = self.value(at, depth)
            values.append(value)
            at = self._behind_comma("]", at)
        return "[" + ", ".join(values) + "]", behind_blanks(self._text, at) + 1

    def _key(self, at: int, colon: str) -> tuple[str, int]:
        at = behind_blanks(self._text, at)
        bare = _KEYS[colon].match(self._text, at)
        if bare is not None:
            return dumped(bare[1]), bare.end()
        if self._text[at : at + 1] not in ('"', "'") and not self._begins_quote(at):
            raise ValueError("no key")
        key, at = self.value(at)
        return key, self._behind(colon, at)


_MOST_STEPS = 16  # from a schema to the types that it names
_CHOICES = ("anyOf", "oneOf", "allOf")


def properties_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of the arguments that a call may have, as far as they are given."""
    found = parameters.get("properties")
    return found if isinstance(found, dict) else {}


def kinds_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a schema names, through references into `root` and choices."""
    if not isinstance(schema, Mapping) or depth > _MOST_STEPS:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: object = root
        for part in reference[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return kinds_of(found, root, depth + 1)
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else {str(each) for each in kind} if isinstance(kind, list) else set()
    choices = (each for name in _CHOICES if isinstance(schema.get(name), list) for each in schema[name])
    return kinds.union(*(kinds_of(each, root, depth + 1) for each in choices))


def as_typed(text: str, key: str, parameters: Mapping[str, Any]) -> str:
    """JSON of an argument's bare `text`: JSON or Python of a type that the schema names, else text.

    Where the schema allows texts, only JSON of another type that it names is none; without a type it may be anything.
    """
    kinds = kinds_of(properties_of(parameters).get(key), parameters)
    try:
        if "string" not in kinds:
            return as_json(text.strip())
        value = loaded(text)
    except ValueError:
        return dumped(text)
    return text.strip() if _kinds_of_value(value) & kinds else dumped(text)


def _kinds_of_value(value: object) -> set[str]:
    """The types of JSON Schema that a value has, texts apart."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    return {name for name, kind in (("null", type(None)), ("object", dict), ("array", list)) if isinstance(value, kind)}

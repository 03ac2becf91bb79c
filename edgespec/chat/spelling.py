"""What is shown as it was written: numbers in JSON (`1e2` is not `100.0`), and tool arguments that are no JSON object.

Templates get stand-ins for both, which are replaced in what they render: they would quote a text and respell a number.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from edgespec.errors import CapabilityError, PromptError

MAX_DEPTH = 64  # levels of arguments that templates can show
_NONCE, _DIGITS = f"written{secrets.token_hex(8)}", f"{10**6 + secrets.randbelow(9 * 10**6)}"
_NUMBER = re.compile(rf"1\.{_DIGITS}\d{{5}}7e-250")  # 14 digits, which Python writes as they are
_TEXT = re.compile(rf'"{_NONCE}(\d+)z"|{_NONCE}(\d+)z')


class Spelled(float):
    """A number that Python would write in another way than its `text`."""

    def __new__(cls, text: str) -> Spelled:
        found = super().__new__(cls, text)
        found.text = text
        return found

    text: str

    def __repr__(self) -> str:
        return str(self.text)


class Unread(str):
    """The arguments of a tool call as they were written, which are no JSON object."""

    __slots__ = ()


def no_constant(name: str) -> NoReturn:
    """For `parse_constant`: NaN and Infinity are no JSON."""
    raise ValueError(f"{name} is no JSON")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value if repr(value) == text else Spelled(text)


def _whole_number(text: str) -> int | float:
    return Spelled(text) if text == "-0" else int(text)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


_EXACT = json.JSONDecoder(
    parse_float=_number, parse_int=_whole_number, parse_constant=no_constant, object_pairs_hook=_without_repeats
)


def read_arguments(given: Any) -> Mapping[str, Any] | Unread:
    """The arguments of an earlier tool call: an object where they are one that can be shown whole, else as written."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, Mapping):
        return given
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        value = _EXACT.decode(text)
        json.dumps(value, ensure_ascii=False).encode()  # not of half a surrogate pair, which an escape can write
    except (ValueError, RecursionError):
        return Unread(text)
    return value if isinstance(value, dict) and not _is_deep(value) else Unread(text)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            below
            for each in level
            if isinstance(each, dict | list)
            for below in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


class _StandIns:
    """Those of one value. `names`: of the texts, in their order."""

    def __init__(self, wrap: Callable[[str], Any]) -> None:
        self._wrap = wrap
        self.names, self.texts, self.numbers = list[str](), list[str](), dict[str, str]()

    def put(self, value: Any) -> Any:
        if isinstance(value, Unread):
            self.names.append(f"{_NONCE}{len(self.texts)}z")
            self.texts.append(str(value))
            return self._wrap(self.names[-1])
        if isinstance(value, Spelled):
            name = f"1.{_DIGITS}{len(self.numbers) % 10**5:05}7e-250"
            self.numbers[name] = value.text
            return float(name)
        if isinstance(value, Mapping):
            return {key: self.put(each) for key, each in value.items()}
        return [self.put(each) for each in value] if isinstance(value, list | tuple) else value

    def restore(self, text: str) -> str:
        text = _NUMBER.sub(lambda found: self.numbers.get(found[0], found[0]), text) if self.numbers else text
        return _TEXT.sub(lambda found: self.texts[int(found[1] or found[2])], text) if self.texts else text


def as_written(value: Any, write: Callable[[Any], str]) -> str:
    """What `write` makes of a value, with its numbers and its unread arguments in it as they are written.

    Where it fails on arguments that are a text, or leaves them out, they become one argument. Raises its errors.
    """
    best, failure = None, None
    for wrap in (str, lambda text: {"arguments": text}):
        stand_ins = _StandIns(wrap)
        shown = stand_ins.put(value)
        try:
            text = write(shown)
        except (PromptError, CapabilityError) as exc:
            if not stand_ins.texts:
                raise
            failure = failure or exc
            continue
        restored = stand_ins.restore(text)
        if all(name in text for name in stand_ins.names):
            return restored
        best = best or restored
    if best is None:
        assert failure is not None
        raise failure
    return best

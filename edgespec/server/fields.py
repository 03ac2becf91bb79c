"""Reads the fields of a request's JSON: every wrong type or unknown name is one clear 400 that names the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from edgespec.config.habits import did_you_mean
from edgespec.errors import shown
from edgespec.sampling.constraint.numbers import scalars
from edgespec.server.http_errors import HttpError, bad_request

MAX_JSON_DEPTH = 64
MAX_CONTAINERS = 1 << 17  # lists and objects of a body: making them is what takes long
_EXPLAINED_BYTES = 1 << 20  # of a body that is no JSON: a longer one is not read twice
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises HttpError 400 if it is none, is nested too deeply or is no UTF-8.

    Whole numbers of any size are exact.
    """
    if _num_containers(body) > MAX_CONTAINERS and _num_containers(_STRING.sub(b"", body)) > MAX_CONTAINERS:
        raise bad_request(f"the body has more than {MAX_CONTAINERS} lists and objects", code="invalid_json")
    try:
        value = _decode(body)
        _check_tree(value)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as exc:
        raise _explained(body, exc) from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, got {_kind(value)}", code="invalid_json")
    return value


def _num_containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _decode_slowly(body: bytes) -> Any:
    value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    if any(isinstance(each, float) and not math.isfinite(each) for each in scalars(value)):
        raise bad_request("the body has a number beyond the range of a double")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad_request("the body has an unpaired UTF-16 surrogate: send whole characters") from None
    return value


def _decode(body: bytes) -> Any:
    try:
        from msgspec.json import decode
    except ImportError:  # over standard input, which needs no extra
        return _decode_slowly(body)
    return decode(body)


def _explained(body: bytes, problem: ValueError) -> HttpError:
    """The error for a body that is no JSON, or holds what cannot be used: Python's own reader says most."""
    reason = str(problem)
    try:
        if len(body) <= _EXPLAINED_BYTES:
            _decode_slowly(body)
    except HttpError as exc:
        return exc
    except RecursionError:
        return _too_deep()
    except ValueError as exc:  # JSON, UTF-8, an integer of thousands of digits
        reason = str(exc) if isinstance(exc, json.JSONDecodeError) else "it is not UTF-8, or a number is too long"
    return bad_request(f"the body is not valid JSON: {reason}", code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise bad_request(f"the body is not valid JSON: {name} is not a JSON number", code="invalid_json")


def _too_deep() -> HttpError:
    return bad_request(f"the body is nested more than {MAX_JSON_DEPTH} levels deep", code="invalid_json")


def _check_tree(value: Any) -> None:
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for below in inner for each in below if isinstance(each, dict | list)]
        if not level:
            return
    raise _too_deep()


class Fields:
    """The fields of one JSON object. A null counts as absent. `finish` refuses every field that was not read.

    `names`: what the client calls the fields of a request that was translated from another protocol. `notes`: what the
    request asks for and does not get, although its answer has the text that was asked for. One list for the whole
    request: give it to the fields that it is translated to.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "",
        names: Mapping[str, str] | None = None,
        notes: list[str] | None = None,
    ) -> None:
        self._values, self._where, self._names = values, where, names or {}
        self.notes: list[str] = [] if notes is None else notes
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """The field's name from the top of the request, as an error gives it."""
        if name in self._names:
            return self._names[name]
        return f"{self._where}.{name}" if self._where else name

    def given(self, name: str) -> Any:
        """The value of a field, None if it is absent."""
        self._read.add(name)
        return self._values.get(name)

    def text(self, name: str, most: int | None = None) -> str | None:
        value = self.given(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, "must be a string", value)
        if most is not None and len(value) > most:
            raise bad_request(
                f"{self.path(name)} has {len(value)} characters; at most {most} are allowed", self.path(name)
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.given(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false", value)
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.given(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"must be a whole number from {low} to {high}", value)
        return value

    def listed(self, name: str, most: int) -> list[Any] | None:
        value = self.given(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, "must be a list", value)
        if len(value) > most:
            raise bad_request(
                f"{self.path(name)} has {len(value)} entries; at most {most} are allowed", self.path(name)
            )
        return value

    def fields(self, name: str) -> Fields | None:
        """A nested object."""
        value = self.given(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "must be an object", value)
        names = {key.removeprefix(f"{name}."): sent for key, sent in self._names.items() if key.startswith(f"{name}.")}
        return Fields(value, self.path(name), names, self.notes)

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        value: str | None = self.given(name)
        if value is not None and value not in allowed:
            raise self.wrong(name, f"must be one of {', '.join(allowed)}", value)
        return value

    def ignore(self, *names: str) -> None:
        """Accept fields that cannot change the answer."""
        self._read.update(names)

    def note(self, name: str, what: str) -> None:
        """Accept a field whose wish is not met, and say so."""
        self._read.add(name)
        self.notes.append(f"{self.path(name)}: {what}")

    def without_effect(self, name: str, why: str, neutral: Iterable[Any] = ()) -> None:
        """Accept a field that cannot change the text, and note `why` unless it has a `neutral` value."""
        value = self.given(name)
        if value is not None and value not in neutral:
            self.note(name, why)

    def refuse(self, name: str, why: str, neutral: Iterable[Any] = ()) -> None:
        """Raise a 400 that says `why` if a field has another value than a `neutral` one, which asks for nothing."""
        value = self.given(name)
        if value is not None and value not in neutral:
            raise bad_request(f"{self.path(name)} is not supported: {why}", self.path(name), "unsupported_parameter")

    def finish(self) -> None:
        """Refuse the fields that nothing has read: an option must not be ignored silently."""
        for name in self._values.keys() - self._read:
            hint = did_you_mean(name, self._read) if len(name) < 64 else ""
            raise bad_request(
                f"unknown field {shown(self.path(name))}{hint}", self.path(name)[:80], "unknown_parameter"
            )

    def wrong(self, name: str, rule: str, value: object) -> HttpError:
        """A 400 for a value that breaks `rule`."""
        return bad_request(f"{self.path(name)} {rule}, got {_kind(value)}", self.path(name))


def _kind(value: object) -> str:
    """A JSON value as an error shows it: short ones themselves, else their type."""
    if isinstance(value, dict | list):
        return {dict: "an object", list: "a list"}[type(value)]
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else shown(value, 40)

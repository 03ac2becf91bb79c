"""JSON schemas as llguidance takes them: known formats, and numbers that a double holds.

It reads every number as a double, and ranges of integers as int64: another value would be allowed than the one that was
asked for, and a range that begins at -2**63 never ends.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from edgespec.errors import ConfigError, shown

Part = tuple[str, dict[str, Any]]  # the path of a schema within another, and the schema
# Those that the library keeps. JSON schema itself asks for none to be kept: the others are notes on what a text is.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_VALUES = ("const", "enum")
_NO_SCHEMAS = (*_VALUES, "default", "examples", "example")
_CLASS = re.compile(r"(?s)\[\^((?:\\.|[^\]\\])*)\]")
_EMBEDDED = "%json"
_MOST_NOTES = 8
_FAR = 2**63 - 1024  # the largest double within int64: a bound behind it is a bound of that type, not of the values
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}


def cleaned(schema: dict[str, Any], kind: str, notes: list[str]) -> dict[str, Any]:
    """`schema`, changed to what the library keeps exactly; `notes` gets what of it is not kept.

    Raises ConfigError for what cannot be kept.
    """
    parts = list(all_parts(schema))
    for path, part in parts:
        try:
            _clean(part, notes)
        except ValueError as exc:
            raise ConfigError(f"{kind} cannot be used: {at(path)}{exc}") from None
    _refuse_counts(parts, kind)
    return schema


def _clean(part: dict[str, Any], notes: list[str]) -> None:
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    if isinstance(pattern := part.get("pattern"), str):
        part["pattern"] = _CLASS.sub(_without_controls, pattern)
    if isinstance(form := part.get("format"), str) and form not in _FORMATS:
        del part["format"]
        kinds = part.get("type", "string")
        is_of_texts = isinstance(kinds, str | list) and "string" in kinds
        note = f"the format {shown(form, 40)} is not enforced"
        if is_of_texts and note not in notes and len(notes) < _MOST_NOTES:
            notes.append(note)
    for name in _VALUES:
        _require_exact(part.get(name))
    part.update(_with_bounds(part))


def _without_controls(found: re.Match[str]) -> str:
    """The library lets a class that leaves out a quotation mark or backslash, but no control character, have them."""
    return f"[^\\x00-\\x1f{found[1]}]" if '"' in found[1] or "\\\\" in found[1] else found[0]


def _refuse_counts(parts: list[Part], kind: str) -> None:
    """Raises ConfigError for a `minProperties` that a repeated name would meet: the library counts it every time."""
    for path, part in parts:
        least, required = part.get("minProperties", 0), part.get("required", [])
        if not (isinstance(least, int) and isinstance(required, list)):
            continue  # in a definition that nothing uses, which the library does not read
        named = len({name for name in required if isinstance(name, str)})
        if least > named + 1:
            raise ConfigError(
                f"{kind} cannot be used: {at(path)}minProperties {least} cannot be kept, as an answer may repeat a "
                f"name: list all names but one under required, where {named} are now"
            )


def all_parts(schema: dict[str, Any]) -> Iterator[Part]:
    """A schema and all inside it, also where only a `$ref` finds them; not the values that answers are to have."""
    rest: list[tuple[str, Any, bool]] = [("", schema, True)]  # path, value, whether its keys are keywords
    while rest:
        path, part, has_keywords = rest.pop()
        if isinstance(part, dict):
            if has_keywords:
                yield path, part
            for name, below in part.items():
                if not (has_keywords and name in _NO_SCHEMAS):
                    rest.append((f"{path}.{name}" if path else name, below, not (has_keywords and name in _NAMED)))
        elif isinstance(part, list):
            rest += [(f"{path}.{index}", below, True) for index, below in enumerate(part)]


def at(path: str) -> str:
    """`path` as errors name it."""
    return f"at {path}: " if path else ""


def with_cleaned_schemas(lark: str, notes: list[str]) -> str:
    """A Lark grammar with the JSON schemas in it `cleaned`; one that does not parse is left to the library."""
    before, *others = lark.split(_EMBEDDED)
    found = [before]
    for part in others:
        try:
            blank = len(part) - len(part.lstrip())
            schema, end = json.JSONDecoder().raw_decode(part, blank)
        except (ValueError, RecursionError):
            schema, end = None, 0
        if isinstance(schema, dict):
            part = f" {json.dumps(cleaned(schema, 'grammar', notes))}{part[end:]}"
        found.append(part)
    return _EMBEDDED.join(found)


# -- numbers


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_bounds(part: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds of one schema as the library keeps them; {} where they are already. Raises ValueError.

    Bounds at or behind those of int64 become the nearest doubles within it.
    """
    changed: dict[str, Any] = {}
    for name, side in _BOUNDS.items():
        bound = part.get(name)
        if not _is_number(bound):
            continue
        if abs(bound) >= _FAR:
            if (bound > 0) != (side > 0):
                raise ValueError(
                    f"{name} {shown(bound)} leaves only numbers behind 2**63, which cannot be kept exactly"
                )
            changed[name] = side * _FAR
        elif not _is_exact(bound):
            raise ValueError(f"{name} {shown(bound)} cannot be kept exactly: take {int(float(bound))}, or a string")
    return changed


def _require_exact(values: Any) -> None:
    """Raises ValueError for a number, in a value that an answer is to have, that the library would round."""
    for each in scalars(values):
        if _is_number(each) and (abs(each) >= _FAR or not _is_exact(each)):
            raise ValueError(f"the value {shown(each)} cannot be kept exactly: take one within 2**53, or a string")


def _is_exact(value: float) -> bool:
    return math.isfinite(value) and int(float(value)) == value if isinstance(value, int) else math.isfinite(value)


def scalars(value: Any) -> Iterator[Any]:
    """Everything in a JSON value that is no list or object."""
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, dict):
            rest += each.values()
        elif isinstance(each, list):
            rest += each
        else:
            yield each

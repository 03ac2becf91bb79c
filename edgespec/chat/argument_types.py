"""What a tool's schema says of one argument: its types, what it may be, and which value a text without marks is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgespec.chat.literals import parsed
from edgespec.chat.spelling import DECODER

_MOST_REFERENCES = 16
_CHOICES = ("anyOf", "oneOf", "allOf")


def schema_of(key: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an argument, references followed; empty where there is none."""
    properties = parameters.get("properties")
    return resolved(properties.get(key), parameters) if isinstance(properties, dict) else {}


def resolved(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """`schema`, or what it refers to in `root`."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        schema = _found(root, reference)
    return {}


def _found(root: Mapping[str, Any], reference: str) -> object:
    found: object = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def kinds_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a schema names."""
    known = resolved(schema, root)
    kind = known.get("type")
    found = {kind} if isinstance(kind, str) else {str(each) for each in kind} if isinstance(kind, list) else set()
    for name in _CHOICES:
        for each in known[name] if isinstance(known.get(name), list) and depth < _MOST_REFERENCES else ():
            found |= kinds_of(each, root, depth + 1)
    if not found and (listed := listed_of(known, root)) is not None and any(isinstance(each, str) for each in listed):
        found.add("string")
    return found


def listed_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> list[Any] | None:
    """All values that a schema allows, where it lists them; None where it does not."""
    known = resolved(schema, root)
    if isinstance(known.get("enum"), list):
        return list(known["enum"])
    if "const" in known:
        return [known["const"]]
    if known.get("type") == "null":
        return [None]
    choices = next((known[name] for name in _CHOICES[:2] if isinstance(known.get(name), list)), None)
    if not choices or depth > _MOST_REFERENCES:
        return None
    found = list[Any]()
    for each in choices:
        listed = listed_of(each, root, depth + 1)
        if listed is None:
            return None
        found += listed
    return found


def bare(value: object) -> str:
    """A value without quotation marks around texts."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_typed(text: str, key: str, parameters: Mapping[str, Any]) -> Any:
    """The value of an argument's bare `text`: text where the schema allows that, else JSON or Python, else text."""
    schema = schema_of(key, parameters)
    listed = listed_of(schema, parameters)
    for value in listed or ():
        if bare(value) == text:
            return value
    kinds = kinds_of(schema, parameters)
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        pass
    try:
        return parsed(text)
    except ValueError:
        return text

"""A cache of measurements between runs, as JSON files with checksums in the user's cache folder.

Losing an entry only costs time: one that cannot be read, is damaged or does not match its reader's schema counts as
missing, and where the folder cannot be written nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import StateError
from edgespec.platform.files import resolved, user_folder, write_atomically

logger = logging.getLogger(__name__)
Schema = Callable[[Any], bool]
"""Whether a JSON value has the shape that its reader needs."""
MOST_SECONDS = 1e4  # longest plausible measurement
_DEEPEST = 8
_FORMAT = 1


def cache_folder() -> Path:
    """Where files lie that may be deleted at any time."""
    return user_folder("cache")


def key_of(*parts: object) -> str:
    """A file name made of everything that a result depends on."""
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:32]


class FileVersion(tuple[str, int, int]):
    """A version of a file: (path, size in bytes, time of change in ns). A file may be replaced while it is in use."""


def file_key(file: Path | FileVersion) -> FileVersion:
    """The version of a file that is there now, or the one given. Raises OSError."""
    if isinstance(file, FileVersion):
        return file
    found = file.stat()
    return FileVersion((str(resolved(file)), found.st_size, found.st_mtime_ns))


def get(kind: str, key: str, schema: Schema) -> Any:
    """What `put` stored under `kind` and `key`; None when it is missing, damaged, or does not match `schema`."""
    try:
        kept = json.loads((cache_folder() / kind / f"{key}.json").read_bytes())
        if not isinstance(kept, dict) or kept.keys() != {"format", "sum", "value"} or kept["format"] != _FORMAT:
            return None
        return kept["value"] if kept["sum"] == _sum_of(kept["value"]) and schema(kept["value"]) else None
    except (OSError, ValueError, RecursionError):
        return None


def put(kind: str, key: str, value: Any) -> bool:
    """Keep a JSON value, written whole or not at all; whether it was."""
    try:
        value = json.loads(json.dumps(value, allow_nan=False))  # as `get` returns it: names are text, tuples lists
        text = json.dumps({"format": _FORMAT, "sum": _sum_of(value), "value": value})
        write_atomically(cache_folder() / kind / f"{key}.json", text, parents=True, durable=False)
    except (StateError, ValueError) as exc:  # the latter for a number that JSON has no word for
        logger.debug("the measurement %s/%s is not kept: %s", kind, key, exc)
        return False
    return True


def is_marked(kind: str, key: str) -> bool:
    """Whether `mark` was called for this key: for entries that only record that something was done to a file."""
    return get(kind, key, a_record({"path": text})) is not None


def mark(kind: str, key: str, path: Path) -> None:
    """Record that something was done to a file, whose identity is part of `key`; `path` is for whoever looks inside."""
    put(kind, key, {"path": str(path)})


def delete(kind: str, key: str) -> None:
    """Remove what `put` stored, if anything."""
    with contextlib.suppress(OSError):
        (cache_folder() / kind / f"{key}.json").unlink()


def _sum_of(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- schemas


def number(low: float, high: float) -> Schema:
    """A finite number in `low`..`high`, not a bool."""

    def fits(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high

    return fits


def whole(low: int, high: int) -> Schema:
    """A whole number in `low`..`high`, not a bool."""

    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return fits


def text(value: Any) -> bool:
    return isinstance(value, str)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def a_list(element: Schema, *, size: int | None = None) -> Schema:
    """A list of any length, or of exactly `size` elements."""

    def fits(value: Any) -> bool:
        return isinstance(value, list) and size in (None, len(value)) and all(map(element, value))

    return fits


def a_row(*elements: Schema) -> Schema:
    """A list of exactly these elements."""

    def fits(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(elements)
            and all(element(each) for element, each in zip(elements, value, strict=True))
        )

    return fits


def a_record(fields: Mapping[str, Schema]) -> Schema:
    """An object with exactly these fields."""

    def fits(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and value.keys() == fields.keys()
            and all(schema(value[name]) for name, schema in fields.items())
        )

    return fits


def a_table(names: Collection[str], element: Schema) -> Schema:
    """An object with at least one field, all of them among `names`."""

    def fits(value: Any) -> bool:
        return (
            isinstance(value, dict) and bool(value) and value.keys() <= set(names) and all(map(element, value.values()))
        )

    return fits


def numbers(value: Any, depth: int = 0) -> bool:
    """Finite numbers in lists and objects of any shape, nested at most _DEEPEST levels."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return depth < _DEEPEST and all(numbers(each, depth + 1) for each in value)
    return number(-1e15, 1e15)(value)


def seconds(value: Any) -> bool:
    """A duration in seconds."""
    return number(0.0, MOST_SECONDS)(value) and value > 0

"""The numbers of JSON schemas as the library takes them: bounds and values that a double holds.

It reads every number as a double, and ranges of integers as int64: another value would be allowed than the one that was
asked for, and a range that begins at -2**63 never ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from edgespec.errors import shown

_FAR = 2**63 - 1024  # the largest double within int64: a bound behind it is a bound of that type, not of the values
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def with_bounds(part: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds of one schema as the library keeps them; {} where they are already. Raises ValueError.

    Bounds at or behind those of int64 become the nearest doubles within it.
    """
    changed: dict[str, Any] = {}
    for name, side in _BOUNDS.items():
        bound = part.get(name)
        if not is_number(bound):
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


def require_exact(values: Any) -> None:
    """Raises ValueError for a number, in a value that an answer is to have, that the library would round."""
    for each in scalars(values):
        if is_number(each) and (abs(each) >= _FAR or not _is_exact(each)):
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

"""The numbers of JSON schemas as the library takes them: bounds and values that a double holds, and small divisors.

It reads every number as a double, and ranges of integers as int64: another value would be allowed than the one that was
asked for, and a range that begins at -2**63 never ends. Divisors it follows digit by digit with one state for each
remainder, and makes all of them before the first token. At 100,000 that takes up to a second, at 1,000,000 nine seconds
and 300 MB, and at 2**30 it does not end. Zeros at a divisor's end cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from edgespec.errors import ConfigError, shown

MOST = 100_000
_FAR = 2**63 - 1024  # the largest double within int64: a bound behind it is a bound of that type, not of the values
_ALLOWED = f"at most {MOST} is allowed, not counting zeros at its end: take a smaller one, or check the answer yourself"
_DIVISOR = "multipleOf"
_MERGING = ("allOf", "anyOf", "oneOf", "$ref")  # what stands beside them holds in their parts, too
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


def is_large(value: Any) -> bool:
    """Whether it is a number that the library would round or not take."""
    return is_number(value) and (abs(value) >= _FAR or not _is_exact(value))


def require_finite(values: Any) -> None:
    """Raises ValueError for a number in a value that an answer is to have, which is none in JSON."""
    for each in scalars(values):
        if isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"the value {shown(each)} cannot be kept exactly: it is beyond all doubles")


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


def refuse_large_divisors(parts: Iterable[tuple[str, Mapping[str, Any]]], kind: str) -> None:
    """Raises ConfigError for a `multipleOf` that takes the library too long, alone or together with others.

    `parts`: (path, schema) of a schema and of all inside it.
    """
    given: list[Decimal] = []
    merges = False
    for path, part in parts:
        merges = merges or any(word in part for word in _MERGING)
        divisor = part.get(_DIVISOR)
        if not is_number(divisor) or not 0 < divisor < math.inf:
            continue
        given.append(Decimal(str(divisor)).normalize())
        if int("".join(map(str, given[-1].as_tuple().digits))) > MOST:
            place = f"at {path}: " if path else ""
            raise ConfigError(f"{kind} cannot be used: {place}{_DIVISOR} {divisor} is too large, {_ALLOWED}")
    shift = max([0, *(-int(each.as_tuple().exponent) for each in given)])
    if merges and len(given) > 1 and math.prod(int(each.scaleb(shift)) for each in given) > MOST:
        raise ConfigError(f"{kind} cannot be used: the product of all {_DIVISOR} is too large, {_ALLOWED}")

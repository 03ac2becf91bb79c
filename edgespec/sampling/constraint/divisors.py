"""The divisors in JSON schemas: large ones are refused, since the library has no limit for them.

It follows the digits of a number with one state for each remainder, and makes all of them before the first token. At
100,000 that takes up to a second, at 1,000,000 nine seconds and 300 MB, and at 2**30 it does not end. Zeros at a
divisor's end cost nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from edgespec.errors import ConfigError

MOST = 100_000
_ALLOWED = f"at most {MOST} is allowed, not counting zeros at its end: take a smaller one, or check the answer yourself"
_WORD, _EMBEDDED = "multipleOf", "%json"
_MERGING = ("allOf", "anyOf", "oneOf", "$ref")  # what stands beside them holds in their parts, too


def embedded_schemas(lark: str) -> Iterator[Any]:
    """The JSON schemas inside a Lark grammar; one that does not parse is left to the library."""
    for part in lark.split(_EMBEDDED)[1:]:
        try:
            yield json.JSONDecoder().raw_decode(part.lstrip())[0]
        except (ValueError, RecursionError):
            continue


def refuse_large_divisors(schema: Any, kind: str) -> None:
    """Raises ConfigError for a `multipleOf` that takes the library too long, alone or together with others."""
    given, merges = _divisors(schema)
    for path, divisor in given:
        if _steps([divisor]) > MOST:
            place = f"at {path}: " if path else ""
            raise ConfigError(f"{kind} cannot be used: {place}{_WORD} {divisor} is too large, {_ALLOWED}")
    if merges and _steps([divisor for _, divisor in given]) > MOST:
        raise ConfigError(f"{kind} cannot be used: the common multiple of all {_WORD} is too large, {_ALLOWED}")


def _divisors(schema: Any) -> tuple[list[tuple[str, Decimal]], bool]:
    """(path, divisor) wherever `schema` has one, and whether it may join several."""
    found: list[tuple[str, Decimal]] = []
    merges = False
    rest: list[tuple[str, Any]] = [("", schema)]
    while rest:
        path, part = rest.pop()
        if isinstance(part, dict):
            merges = merges or any(word in part for word in _MERGING)
            divisor = part.get(_WORD)
            if isinstance(divisor, int | float) and not isinstance(divisor, bool) and 0 < divisor < math.inf:
                found.append((path, Decimal(str(divisor))))
            rest += [(f"{path}.{name}" if path else name, below) for name, below in part.items()]
        elif isinstance(part, list):
            rest += [(f"{path}.{index}", below) for index, below in enumerate(part)]
    return found, merges


def _steps(divisors: list[Decimal]) -> int:
    """The common multiple of numbers as a whole number without zeros at its end; no further than needed."""
    shift = max((-int(each.as_tuple().exponent) for each in divisors), default=0)
    multiple = 1
    for each in divisors:
        multiple = math.lcm(multiple, int(each.scaleb(shift)))
        if (steps := _without_zeros(multiple)) > MOST:
            return steps
    return _without_zeros(multiple)


def _without_zeros(number: int) -> int:
    while number % 10 == 0:
        number //= 10
    return number

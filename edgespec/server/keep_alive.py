"""Ollama's field `keep_alive`: for how long the model is to stay loaded without a request."""

from __future__ import annotations

import math
import re

from edgespec.server.fields import Fields

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = rf"(\d+\.?\d*|\.\d+)({'|'.join(_SECONDS)})"  # "ms" before "m"
_DURATION = re.compile(rf"([+-]?)((?:{_PART})+)", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?", re.ASCII)


def read_keep_alive(fields: Fields) -> float | None:
    """Seconds, infinite where the field is negative; None where it is absent. Raises HttpError.

    A number has no unit or, as in Go, each of its parts one: 300, "5m", "1h30m".
    """
    given = fields.given("keep_alive")
    if given is None:
        return None
    seconds = _seconds(given)
    if seconds is None:
        raise fields.wrong("keep_alive", 'must be seconds or a duration such as "5m"; -1 is for ever', given)
    return math.inf if seconds < 0 else seconds


def _seconds(given: object) -> float | None:
    """What it says; None where that is nothing."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(max(-1, min(given, 1e12)))  # an integer may be beyond any float
    if not isinstance(given, str) or len(given) > 64:
        return None
    if _NUMBER.fullmatch(given):
        return float(given)
    if (found := _DURATION.fullmatch(given)) is None:
        return None
    total = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, found[2]))
    return -total if found[1] == "-" else total

"""Damage to bytes, texts and JSON values, the same for the same random numbers; what `fuzz.py` damages things with."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from collections.abc import Callable
from typing import Any

EXTREME_NUMBERS = (0, 1, -1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 100, 0.5, 1e38, 1e308, 2**31, 2**63, 10**400),
    *("", "x", "1e3", "\0", "\x1b[2J"),
    *("é\u202e", "x" * 10_000, "../..", [], {}, [[]], [1, [2]], {"a": {}}, math.inf, -math.inf, math.nan),
)


def damaged_bytes(rng: random.Random, data: bytes, first: int = 0, last: int | None = None) -> bytes:
    """`data` with one kind of damage in first..last: flipped bits, an extreme number, a hole, a cut, a shift."""
    end = len(data) if last is None else min(last, len(data))
    if end <= first:
        return data[: rng.randrange(len(data) + 1)]
    at = rng.randrange(first, end)
    size = min(rng.choice((1, 4, 8, 64, 4096)), end - at)
    damage: tuple[Callable[[], bytes], ...] = (
        lambda: _flipped(rng, data, first, end),
        lambda: data[:at] + _extreme(rng) + data[at + 8 :],
        lambda: data[:at] + rng.choice((b"\0", b"\xff", b" ")) * size + data[at + size :],
        lambda: data[:at],
        lambda: data[:at] + rng.randbytes(size) + data[at:],
        lambda: data[:at] + data[at + size :],
        lambda: data[:at] + rng.randbytes(size) + data[at + size :],
        lambda: data + rng.randbytes(size),
    )
    return rng.choice(damage)()


def _flipped(rng: random.Random, data: bytes, first: int, end: int) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        found[rng.randrange(first, end)] ^= 1 << rng.randrange(8)
    return bytes(found)


def _extreme(rng: random.Random) -> bytes:
    number = rng.choice(EXTREME_NUMBERS)
    return struct.pack("<Q", number % 2**64) if rng.random() < 0.7 else struct.pack("<d", float(number))


def damaged_json(rng: random.Random, text: str) -> str:
    """JSON in which one value, somewhere, is another; or one name."""
    root = [json.loads(text)]
    places = list(_places(root))
    holder, key = rng.choice(places)
    if isinstance(holder, dict) and rng.random() < 0.2:
        value = holder.pop(key)
        if rng.random() < 0.5:
            holder[rng.choice(("", "x", str(key) + "s", "100"))] = value
    else:
        holder[key] = rng.choice(ODD_VALUES)
    return json.dumps(root[0])


def _places(value: Any, most: int = 3000) -> list[tuple[Any, Any]]:
    """(container, key) of every value below `value`, as far as there are not too many."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < most:
        here = waiting.pop(0)
        keys = list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        found += [(here, key) for key in keys]
        waiting += [here[key] for key in keys]
    return found


def damaged_text(rng: random.Random, text: str) -> str:
    """A text of settings (TOML) in which one word or number is another, or a line is gone, twice there or cut off."""
    lines = text.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    damage = rng.randrange(5)
    if damage == 0:
        del lines[at]
    elif damage == 1:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif damage == 2:
        lines[at] = lines[at][: rng.randrange(len(lines[at]))]
    else:
        words = list(re.finditer(r'[\w.]+|"[^"]*"', lines[at]))
        if words:
            word = rng.choice(words)
            value = rng.choice(ODD_VALUES)
            spelt = json.dumps(value) if damage == 3 else str(value)
            lines[at] = lines[at][: word.start()] + spelt + lines[at][word.end() :]
    return "".join(lines)

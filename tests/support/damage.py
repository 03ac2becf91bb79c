"""Files as a failing disk or another program might leave them."""

from __future__ import annotations

import random


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """`whole` with some bytes changed, and one time in three cut off somewhere."""
    found = bytearray(whole)
    for _ in range(rng.choice((1, 8, 64))):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found[: rng.randrange(len(found))] if rng.random() < 1 / 3 else found)

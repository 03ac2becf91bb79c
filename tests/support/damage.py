"""Files as a failing disk or another program might leave them."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """`whole` with some bytes changed, and one time in three cut off somewhere."""
    found = bytearray(whole)
    for _ in range(rng.choice((1, 8, 64))):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found[: rng.randrange(len(found))] if rng.random() < 1 / 3 else found)


@contextmanager
def changing(path: Path) -> Iterator[sqlite3.Connection]:
    """A database to change; the connection's own block commits but leaves it open."""
    with closing(sqlite3.connect(path)) as connection, connection:
        yield connection

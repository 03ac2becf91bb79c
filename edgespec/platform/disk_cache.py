"""A cache of measurements between runs, as JSON files in the user's cache folder.

Losing an entry only costs time: one that cannot be read, is damaged or has not the type that its reader wants counts as
missing, and where the folder cannot be written nothing is kept. Types are those that msgspec decodes.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Annotated, Any

import msgspec

from edgespec.errors import StateError
from edgespec.platform.files import resolved, user_folder, write_atomically

logger = logging.getLogger(__name__)
Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=1e4)]  # of a plausible measurement


def key_of(*parts: object) -> str:
    """A file name made of everything that a result depends on."""
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:32]


FileVersion = tuple[str, int, int]


def file_key(file: Path) -> FileVersion:
    """The version of a file that is there now: (path, size in bytes, time of change in ns). Raises OSError."""
    found = file.stat()
    return str(resolved(file)), found.st_size, found.st_mtime_ns


def get(kind: str, key: str, shape: Any = Any) -> Any:
    """What `put` stored under `kind` and `key`, as the type `shape`; None when it is missing, damaged or another."""
    try:
        return msgspec.json.decode((user_folder("cache") / kind / f"{key}.json").read_bytes(), type=shape)
    except (OSError, ValueError, RecursionError):
        return None


def put(kind: str, key: str, value: Any) -> bool:
    """Keep a value, written whole or not at all; whether it was."""
    try:
        data = msgspec.json.encode(value)
        write_atomically(user_folder("cache") / kind / f"{key}.json", data, parents=True, durable=False)
    except (StateError, ValueError) as exc:
        logger.debug("the measurement %s/%s is not kept: %s", kind, key, exc)
        return False
    return True

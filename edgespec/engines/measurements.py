"""Small results that are costly to measure, kept between runs in the user's cache folder as JSON.

Losing them costs time and nothing else: an unreadable entry counts as missing, a folder that cannot be written as full.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """`EDGESPEC_HOME`/cache, else the platform's place for files that may be deleted at any time."""
    if home := os.environ.get("EDGESPEC_HOME"):
        return Path(home) / "cache"
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "edgespec"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "edgespec"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "edgespec" / "cache"
    return Path.home() / ".cache" / "edgespec"


def key_of(*parts: object) -> str:
    """A file name for everything that a result depends on."""
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:32]


def file_key(path: Path) -> tuple[str, int, int]:
    """What tells a file from an older one of the same name: (path, size in bytes, time of change in ns)."""
    found = path.stat()
    return str(path.resolve()), found.st_size, found.st_mtime_ns


def recall(kind: str, key: str) -> Any:
    """What `remember` kept under `kind` and `key`, or None."""
    try:
        return json.loads((cache_folder() / kind / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None


def remember(kind: str, key: str, value: Any) -> None:
    """Keep a JSON value; written whole or not at all."""
    folder = cache_folder() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(value, file)
        Path(temporary).replace(folder / f"{key}.json")
    except OSError as exc:
        logger.debug("the measurement %s/%s is not kept: %s", kind, key, exc)

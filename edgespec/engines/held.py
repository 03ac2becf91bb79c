"""Keeps the files of a loaded model open and notices when one is changed in place.

Weights are mapped, not copied: where a file is truncated, touching what is gone ends the process with SIGBUS, and where
it is written over, the model writes nonsense. Before each pass the files are compared with what they were, which costs
microseconds. What changes during a pass is not noticed before the next one.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from edgespec.errors import EngineError

Seen = tuple[int, int]  # size in bytes, time of change in ns


class HeldFiles:
    """Open files and what they were when the model was loaded. A file that cannot be opened is not watched."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: list[tuple[Path, int, Seen]] = []
        for path in paths:
            with suppress(OSError):
                handle = os.open(path, os.O_RDONLY)
                self._files.append((path, handle, _seen(handle)))
        self._release = weakref.finalize(self, _close, [handle for _, handle, _ in self._files])

    def check(self) -> None:
        """Raises EngineError where a file is not what it was; to be called before each pass."""
        for path, handle, before in self._files:
            if _seen(handle) != before:
                raise EngineError(
                    f"{path} was changed while the model was in use and reading weights from it: load the model again "
                    "(write new files under another name and rename them)"
                )

    def close(self) -> None:
        """Close the files; closing twice is allowed."""
        self._files = []
        self._release()


def _close(handles: Iterable[int]) -> None:
    for handle in handles:
        os.close(handle)


def _seen(handle: int) -> Seen:
    found = os.fstat(handle)
    return found.st_size, found.st_mtime_ns

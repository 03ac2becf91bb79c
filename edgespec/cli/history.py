"""The lines typed in earlier chats, kept in one file of the user's own; a chat never fails because of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from edgespec.cli.terminal import note


class _SafeHistory(FileHistory):
    """A file that can no longer be written, as on a full disk, costs the line in it and nothing else."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def open_history(path: Path) -> History:
    """The history in `path`, readable for its owner only; in memory, with a note, where it cannot be used."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError as exc:
        note(f"note: input history is off: {path}: {exc.strerror}")
        return InMemoryHistory()
    return _SafeHistory(str(path))

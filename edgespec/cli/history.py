"""The lines typed in earlier chats, in a file of the user's own; a chat never fails because of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit.history import History

from edgespec.errors import StateError
from edgespec.formats.files import write_atomically

MAX_LINES = 2000


class FileHistory(History):
    """One JSON string per line, so that several lines typed as one stay one; appended in a single write.

    A file that cannot be read or written is told once through `tell`, and history lives in memory from then on.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._path: Path | None = path
        self._tell = tell

    def load_history_strings(self) -> Iterable[str]:
        """The newest first, as prompt_toolkit wants them; an overlong file is cut to its newest lines."""
        if self._path is None or not self._path.exists():
            return []
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            if len(lines) > 2 * MAX_LINES:
                lines = lines[-MAX_LINES:]
                write_atomically(self._path, "".join(line + "\n" for line in lines), private=True)
        except (OSError, StateError) as exc:
            self._give_up(str(exc))
            return []
        return [text for line in reversed(lines) if (text := _parsed(line)) is not None]

    def store_string(self, string: str) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, (json.dumps(string) + "\n").encode())
            finally:
                os.close(handle)
        except OSError as exc:
            self._give_up(str(exc))

    def _give_up(self, reason: str) -> None:
        self._path = None
        self._tell(f"note: what you type is not remembered: {reason}")


def _parsed(line: str) -> str | None:
    try:
        text = json.loads(line)
    except json.JSONDecodeError:  # a line cut short by a crash is skipped
        return None
    return text if isinstance(text, str) else None

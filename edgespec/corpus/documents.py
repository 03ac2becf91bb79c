"""The texts of files and folders: what is no text is left out and counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from edgespec.errors import ConfigError
from edgespec.formats.files import exists, is_file, is_folder

MAX_FILE_BYTES = 32 << 20
_SNIFFED_BYTES = 8192


class Documents:
    """The text files at or below `path`, read one by one; `left_out` counts the others by reason.

    Raises ConfigError when `path` is not there, cannot be read, or is a file that is no text.
    """

    def __init__(self, path: Path) -> None:
        if not exists(path):
            raise ConfigError(f"no file or folder {str(path)!r}: give the path of a text file or of a folder of them")
        self.path = path
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[tuple[Path, str]]:
        """(file, its text), in the order of their names. Hidden files and folders are left out, links not followed."""
        if not is_folder(self.path):
            text, reason = read_text(self.path)
            if reason:
                raise ConfigError(f"{self.path} is {reason}: give a file of text in UTF-8")
            yield self.path, text
            return
        for folder, subfolders, names in os.walk(self.path, onerror=self._count_folder):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                file = Path(folder) / name
                text, reason = read_text(file) if not file.is_symlink() else ("", "a link")
                if reason:
                    self.left_out[reason] += 1
                else:
                    yield file, text

    def _count_folder(self, error: OSError) -> None:
        self.left_out[f"unreadable, {error.strerror}"] += 1


def read_text(path: Path) -> tuple[str, str]:
    """(the text of a file, "") or ("", why it has none)."""
    try:
        if not is_file(path):
            return "", "no regular file"
        if path.stat().st_size > MAX_FILE_BYTES:
            return "", f"larger than {MAX_FILE_BYTES >> 20} MiB"
        contents = path.read_bytes()
    except OSError as exc:
        return "", f"unreadable, {exc.strerror}"
    if b"\0" in contents[:_SNIFFED_BYTES]:
        return "", "binary"
    try:
        text = contents.decode("utf-8-sig")
    except UnicodeDecodeError:
        return "", "not UTF-8"
    return (text, "") if text.strip() else ("", "empty")

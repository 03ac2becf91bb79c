"""Reads text files and folders of them; files that are not text are skipped and counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from edgespec.errors import ConfigError
from edgespec.platform.files import exists, is_file, is_folder

MAX_FILE_BYTES = 32 << 20
_SNIFFED_BYTES = 8192


class Documents:
    """The text files at or below `path`, read one by one; `left_out` counts skipped files by reason.

    Raises ConfigError if `path` does not exist, or is a file that cannot be read or is not text.
    """

    def __init__(self, path: Path) -> None:
        if not exists(path):
            raise ConfigError(f"no file or folder {str(path)!r}: give a text file or a folder of text files")
        self.path = path
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[tuple[Path, str]]:
        """(file, its text), sorted by name. Skips hidden files and folders, and links."""
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
    """(text of the file, ""), or ("", the reason why it is skipped)."""
    try:
        if not is_file(path):
            return "", "not a regular file"
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

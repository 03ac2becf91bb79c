"""Text on standard input, for `generate`: the prompt itself, or what comes behind the prompt of -p.

With -p nobody has said that there is such text, so only a file or a pipe is read, as `program < FILE` and `other |
program` make them: a terminal, /dev/null and a socket (what Node.js gives its children) are not. A pipe may also be
one that a supervisor never writes to and never closes. So the first byte is waited for as long as a program before
this one usually needs for it, and what is done is said both ways: nothing is dropped silently, and nothing hangs.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from typing import NoReturn

from edgespec.cli.terminal import counted, note
from edgespec.errors import PromptError
from edgespec.platform.files import MAX_TEXT_BYTES

FIRST_BYTE_S, PATIENCE_S = 10.0, 1.0
_INSTEAD = "< /dev/null answers without it"


def whole_input() -> str:
    """All of standard input. Raises PromptError for what is no text."""
    return _decoded(sys.stdin.buffer.read())


def text_behind() -> str:
    """What a file or a pipe on standard input holds; empty where there is neither. Raises PromptError."""
    try:
        descriptor = sys.stdin.fileno()
        found = os.fstat(descriptor)
    except (OSError, ValueError):  # closed, or no file at all
        return ""
    if stat.S_ISREG(found.st_mode):
        data = sys.stdin.buffer.read() if found.st_size <= MAX_TEXT_BYTES else _too_long()
    elif stat.S_ISFIFO(found.st_mode):
        data = _of_pipe(descriptor)
    else:
        return ""
    text = _decoded(data)
    if not text.strip():
        return ""
    note(f"standard input: {counted(len(text), 'character')} behind the prompt")
    return text


def _of_pipe(descriptor: int) -> bytes:
    """All that comes, if the first of it comes in time; read in a thread, as Windows cannot wait for a pipe."""
    found, has_begun = bytearray(), threading.Event()

    def read() -> None:
        try:
            while len(found) <= MAX_TEXT_BYTES and (chunk := os.read(descriptor, 1 << 16)):
                found.extend(chunk)
                has_begun.set()
        finally:
            has_begun.set()

    reader = threading.Thread(target=read, name="standard-input", daemon=True)
    reader.start()
    if not has_begun.wait(PATIENCE_S):
        note(f"waiting for standard input, a pipe without data so far ({_INSTEAD})")
        if not has_begun.wait(FIRST_BYTE_S - PATIENCE_S):
            note(f"no data on standard input in {FIRST_BYTE_S:.0f} s: answering without it ({_INSTEAD} at once)")
            return b""
    reader.join(PATIENCE_S)
    if reader.is_alive():
        note(f"reading standard input until it is closed ({_INSTEAD})")
    while reader.is_alive():
        reader.join(0.2)  # with a limit, so that Ctrl-C comes through on Windows
    return bytes(found) if len(found) <= MAX_TEXT_BYTES else _too_long()


def _too_long() -> NoReturn:
    raise PromptError(f"standard input has more than {MAX_TEXT_BYTES >> 20} MiB: give less text")


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as exc:
        raise PromptError(f"standard input is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc

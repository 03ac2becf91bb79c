"""`edgespec` by click's runner, and in a pseudo terminal of its own (not on Windows), so that Ctrl-C is a key."""

from __future__ import annotations

import os
import select
import shlex
import struct
import subprocess
import sys
import time
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edgespec.cli.main import cli

POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has neither signals for one child nor pseudo terminals")
ASKING, ANSWERING = "\x1b[?2004h", "\x1b[?2004l"  # the line editor switches bracketed paste on and off


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, list(arguments), input=stdin)


def refusal(result: Result, *said: str, code: int = 2, beside: str = "note: ") -> str:
    """The one line that a bad input gets, which says these words: no traceback, and nothing on standard output.

    `beside`: how notes begin.
    """
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith(beside)]
    assert line.startswith("error: ") and all(text in line for text in said), line
    return line


class Terminal:
    """A command as it runs. `script`: what a shell runs instead, with the command in place of {}; `size`: letters."""

    def __init__(
        self, *arguments: str, script: str | None = None, size: tuple[int, int] = (200, 24), **environ: str
    ) -> None:
        import fcntl
        import pty
        import termios

        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        command = [sys.executable, "-m", "edgespec", *arguments]

        self.process = subprocess.Popen(
            command if script is None else ["sh", "-c", script.format(shlex.join(command))],
            env={**os.environ, "TERM": "xterm-256color", **environ},
            preexec_fn=lambda: os.login_tty(slave),
        )
        os.close(slave)
        self._unread = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def _read(self, until_s: float) -> bool:
        """Read what has appeared by `until_s` at the latest; False where it has ended."""
        ready, _, _ = select.select([self._master], [], [], max(until_s - time.monotonic(), 0))
        assert ready, f"waited, saw {self._unread!r}"
        try:
            found = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self._unread += found.decode(errors="replace")
        return bool(found)

    def wait_for(self, text: str, within_s: float = 120) -> str:
        """Read up to `text`; what came with it. What comes after it is left for the next call."""
        until_s = time.monotonic() + within_s
        while text not in self._unread:
            assert self._read(until_s), f"waited for {text!r}, saw {self._unread!r}"
        seen, _, self._unread = self._unread.partition(text)
        return seen

    def wait_for_more(self) -> None:
        """Wait until a letter has appeared that was not waited for."""
        while not any(letter.isalpha() for letter in self._unread):
            self._read(time.monotonic() + 60)

    def rest(self, within_s: float = 120) -> str:
        """All that appears from here to the end of the process."""
        until_s = time.monotonic() + within_s
        while self._read(until_s):
            pass
        self.process.wait(60)
        return self._unread

    def enter(self, line: str) -> None:
        """Type a line at the prompt, and wait until it is taken."""
        self.wait_for(ASKING)
        self.type(line + "\r")
        self.wait_for(ANSWERING)

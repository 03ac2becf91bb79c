"""What commands print in a terminal of 80 columns: lines end at words, and say what they say through a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from command_line import POSIX, Terminal

pytestmark = POSIX
COLUMNS = 80


def printed(arguments: list[str], home: Path, *, is_terminal: bool) -> str:
    """Standard output of a command, without colours."""
    environment = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "xterm"}
    environment |= {"EDGESPEC_HOME": str(home), "EDGESPEC_MODELS": str(home / "models")}
    if is_terminal:
        with Terminal(*arguments, size=(COLUMNS, 24), has_errors=False, **environment) as terminal:
            return click.unstyle(terminal.rest()).replace("\r\n", "\n")
    command = [sys.executable, "-m", "edgespec", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    "typed",
    ["show qwen3-8b", "plan demo --memory 20MB"],
)
def test_lines_end_at_words(typed: str, tmp_path: Path) -> None:
    arguments = typed.split()
    wide = printed(arguments, tmp_path, is_terminal=False)
    narrow = printed(arguments, tmp_path, is_terminal=True)
    lines = narrow.splitlines()
    assert len(lines) > len(wide.splitlines()), "nothing was broken"
    assert all(len(line) <= COLUMNS or " " not in line.strip() for line in lines)
    assert narrow.split() == wide.split()

"""The command line: parses, calls the runtime, prints. One module per command."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from functools import partial


def has_escapes() -> bool:
    """Whether escape codes may be written to a terminal; click drops them elsewhere."""
    return os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def wrapped(text: str) -> str:
    """Lines for stderr, broken at words where it is a terminal. Programs get them whole."""
    if not sys.stderr.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    fill = partial(textwrap.fill, width=columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(fill, text.split("\n")))

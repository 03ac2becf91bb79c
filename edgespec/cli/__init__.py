"""The command line: parses, calls the runtime, prints. One module per command."""

from __future__ import annotations

import os


def has_escapes() -> bool:
    """Whether escape codes may be written to a terminal; click drops them elsewhere."""
    return os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")

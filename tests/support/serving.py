"""`edgespec serve` as a child process, for tests that need a real socket or real standard streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo import TEST_THREADS, heed_interrupts

BASE_URL = "http://127.0.0.1"
ENDS_WITHIN_S = 60.0


@contextmanager
def served(home: Path, *options: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process, with pipes; ended with the block, if it has not ended itself."""
    command = [sys.executable, "-m", "edgespec", "serve", "demo", "-t", str(TEST_THREADS), *options]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"EDGESPEC_HOME": str(home)} | variables
    process = subprocess.Popen(command, **pipes, env=environment, preexec_fn=heed_interrupts)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The next line of its standard output, which is JSON."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, f"it has ended: {process.stderr.read().decode()}"
    found: dict[str, Any] = json.loads(line)
    return found


def errors_of(process: subprocess.Popen[bytes]) -> str:
    """Its standard error, to the end."""
    assert process.stderr is not None
    return process.stderr.read().decode()

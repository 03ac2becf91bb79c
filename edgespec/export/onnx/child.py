"""Runs an exporter in a child process, which isolates its memory and output, and turns its failure into one error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.installation import child_environment, install_command

MISSING = "ModuleNotFoundError: No module named "
LINES_KEPT = 40
KILLED = (-9, 137)
OnStart = Callable[[subprocess.Popen[str]], None]


def run_child(
    module: str, order: Mapping[str, Any], on_line: Callable[[str], None], on_start: OnStart = lambda child: None
) -> None:
    """Run `python -m module ORDER` offline; `on_line` is called with every line that it prints.

    `on_start` is called with the process, which another thread may kill.

    Raises CapabilityError if a package is missing, the disk is full or the process was killed; ModelFileError with the
    last line of output for any other failure.
    """
    command = [sys.executable, "-P", "-m", module, json.dumps(dict(order))]
    run_command(command, on_line, what=f"{order['architecture']} from {order['source']}", on_start=on_start)


def run_command(
    command: list[str], on_line: Callable[[str], None], *, what: str, on_start: OnStart = lambda child: None
) -> None:
    """Run a command and read its output line by line; `what` names the work in errors, which are as in `run_child`."""
    said: deque[str] = deque(maxlen=LINES_KEPT)
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # closes when this process ends, which ends the child: see follow_parent
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=child_environment(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", PYTHONUNBUFFERED="1"),
    ) as process:
        assert process.stdout is not None
        try:
            on_start(process)
            for line in process.stdout:
                if line.strip():
                    said.append(line.strip())
                    on_line(line.strip())
        finally:
            if sys.exc_info()[0] is not None:
                process.kill()
    if process.returncode:
        raise failure(process.returncode, list(said), what)


def failure(returncode: int, said: list[str], what: str) -> CapabilityError | ModelFileError:
    """The error for a failed exporter, derived from its last lines."""
    last = said[-1] if said else "no output"
    text = "\n".join(said)
    if MISSING in text:
        name = text.rpartition(MISSING)[2].splitlines()[0].strip("'\"")
        return CapabilityError(f"exporting {what} needs {name}: {install_command('export')}")
    if "No space left on device" in text:
        return CapabilityError(f"exporting {what} filled the disk: free some space and run it again")
    if returncode in KILLED:
        return CapabilityError(f"exporting {what} was killed, most likely because memory ran out: {last}")
    return ModelFileError(f"{what} cannot be exported: {last}")


def follow_parent() -> None:
    """For the child: end this process when its standard input is closed, which also happens when the parent dies.

    Otherwise the child of a killed export would continue to write into the folder of the next export.
    """

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock, held here, would abort the interpreter's exit
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()

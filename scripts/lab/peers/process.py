"""The parent's end of one peer's child process: orders out, answers in, each within its time.

Only the child that was asked computes; the others wait for a line. A child whose parent is gone reads the end of its
standard input and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import sleep
from typing import IO, Any

import edgespec
from edgespec.errors import CapabilityError, EngineError
from edgespec.installation import NO_TELEMETRY
from peers.base import Answer, Request

OPEN_S = 1800.0  # an export may be part of it
STOP_S = 10.0
TAIL = 300
SETTLE_S = 0.05
SETTINGS = {"GGML_NO_BACKTRACE": "1", NO_TELEMETRY: "1"}  # of a child's environment


class PeerProcess:
    """A peer in a child process, started by the first order and again by the first one after a failure.

    `python` runs it, which lets a library live in an environment of its own; `log` gets all that it prints.
    """

    def __init__(self, name: str, files: Mapping[str, str], log: Path, python: str = sys.executable) -> None:
        self.name = name
        self.library = ""
        self.starts = 0
        self._files = dict(files)
        self._log = log
        self._python = python
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def open(self) -> str:
        """Start it if it does not run; returns the library's name and version. Raises as `ask`."""
        if self._process is None:
            self._start()
            self.starts += 1
            try:
                self.library = str(self._ask({"do": "open", "files": self._files}, OPEN_S))
            except CapabilityError:
                self.close()
                raise
        return self.library

    def generate(self, request: Request, timeout_s: float) -> Answer:
        """Raises CapabilityError when the peer refuses, EngineError when it dies or takes longer than `timeout_s`."""
        return Answer.from_json(self.ask({"do": "generate", "request": request.to_json()}, timeout_s))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts. Raises as `ask`."""
        ids: list[list[int]] = self.ask({"do": "encode", "texts": list(texts)}, OPEN_S)
        return ids

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        """The answer to one order. Raises CapabilityError for a refusal, EngineError for death or lateness."""
        self.open()
        return self._ask(message, timeout_s)

    def close(self) -> None:
        """End it: kindly, then not. Whatever it started ends with it."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it is dead already
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        _kill(process)
        process.wait()

    def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        roots = [str(Path(edgespec.__file__).resolve().parent.parent), str(Path(__file__).resolve().parents[1])]
        paths = [*roots, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        with self._log.open("a", encoding="utf-8") as log:
            try:
                self._process = subprocess.Popen(
                    [self._python, "-m", "peers.child", self.name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    encoding="utf-8",
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **SETTINGS},
                    process_group=0 if os.name == "posix" else None,
                )
            except OSError as exc:
                raise CapabilityError(f"{self._python} cannot be run ({exc}): give another --python") from exc
        self._replies = queue.SimpleQueue()
        assert self._process.stdout is not None
        threading.Thread(target=_pump, args=(self._process.stdout, self._replies), daemon=True).start()

    def _ask(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None
        sleep(SETTLE_S)  # threads of the library that answered last may still spin
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = self._replies.get(timeout=timeout_s)
        except BrokenPipeError:
            line = None
        except queue.Empty:
            _kill(process)
            self.close()
            raise EngineError(f"{self.name} took longer than {timeout_s:g} s and was ended") from None
        if line is None:
            self.close()
            raise EngineError(f"{self.name} died with {process.returncode}: {self._last_words()}")
        reply = json.loads(line)
        if "refused" in reply:
            raise CapabilityError(reply["refused"])
        return reply["ok"]

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip()[-TAIL:] for line in reversed(lines) if line.strip()), "it said nothing")


def _pump(lines: IO[str], replies: queue.SimpleQueue[str | None]) -> None:
    """Pass lines on, None at the end: waiting on a queue has a time limit, reading a pipe has none."""
    for line in lines:
        replies.put(line)
    replies.put(None)
    lines.close()


def _kill(process: subprocess.Popen[str]) -> None:
    """End the child and all it started, where the system has groups of processes."""
    if os.name != "posix":
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)

"""The parent's end of a runtime's child process: orders out, answers in, each within its time.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from time import sleep
from typing import IO, Any

from edgespec.__main__ import LARGE_PAGES
from edgespec.installation import NO_TELEMETRY
from peers.base import Answer, Files, Question, Refusal, Settings

ROOT = Path(__file__).resolve().parents[3]
OPEN_S, ANSWER_S, STOP_S = 900.0, 900.0, 10.0
SETTLE_S = 0.05
TAIL = 300
ENVIRONMENT = {"GGML_NO_BACKTRACE": "1", NO_TELEMETRY: "1"}
if sys.platform == "linux":
    ENVIRONMENT |= LARGE_PAGES  # as our command; for all runtimes


class RuntimeFailure(Exception):
    """The child died or took too long; the text has its last words."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers in the order of the prompts, and the most memory that the runtime has had so far."""

    answers: list[Answer]
    peak_bytes: int | None


class Child:
    """A runtime in a process of its own from construction to `close`; `title` is its library and version.

    `python` runs it, so that a library can live in an environment of its own. `log` gets all that it prints. `home` is
    edgespec's folder for what it learns. Raises Refusal when the runtime refuses model or settings, RuntimeFailure.
    """

    def __init__(self, runtime: str, files: Files, settings: Settings, *, log: Path, home: Path, python: str) -> None:
        self._log, self._name = log, runtime
        paths = [str(ROOT), str(ROOT / "scripts" / "lab"), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "EDGESPEC_HOME": str(home)}
        for folder in (log.parent, home):
            folder.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as output:
            try:
                self._process = subprocess.Popen(
                    [python or sys.executable, "-m", "peers", runtime],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    encoding="utf-8",
                    env={**os.environ, **environment, **ENVIRONMENT},
                    process_group=0 if os.name == "posix" else None,
                )
            except OSError as exc:
                raise Refusal(f"{python} cannot be run ({exc}): give another --python") from exc
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdout is not None
        threading.Thread(target=_pump, args=(self._process.stdout, self._replies), daemon=True).start()
        try:
            self.title = str(self._order({"do": "open", "files": dict(files), "settings": dict(settings)}, OPEN_S))
        except BaseException:
            self.close()
            raise

    def ask(self, question: Question) -> Reply:
        """Raises Refusal, or RuntimeFailure when the child dies or takes too long."""
        told = self._order({"do": "ask", "question": asdict(question)}, ANSWER_S)
        return Reply([Answer(**answer) for answer in told["answers"]], told["peak_bytes"])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts. Raises as `ask`."""
        ids: list[list[int]] = self._order({"do": "encode", "texts": list(texts)}, ANSWER_S)
        return ids

    def close(self) -> None:
        """End it: kindly, then not. Whatever it started ends with it."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it is dead already
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()

    def _order(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        assert self._process.stdin is not None
        sleep(SETTLE_S)  # threads of the library that answered last may still spin
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=timeout_s)
        except BrokenPipeError:
            line = None
        except queue.Empty:
            raise RuntimeFailure(f"{self._name} took longer than {timeout_s:g} s") from None
        if line is None:
            code = self._process.wait(STOP_S)
            raise RuntimeFailure(f"{self._name} died with {code}: {self._last_words()}")
        reply = json.loads(line)
        if "refused" in reply:
            raise Refusal(reply["refused"])
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

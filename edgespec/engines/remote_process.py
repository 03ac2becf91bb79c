"""The parent's side of the child process that holds a model: starts it, calls it, and notices when it is gone."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from typing import Any

from edgespec import errors
from edgespec.engines import progress
from edgespec.engines.remote_pipe import CANCEL, Answer, Call, Pipe, Report
from edgespec.errors import EdgespecError, EngineError
from edgespec.installation import child_environment

logger = logging.getLogger("edgespec")
CANCEL_S = 4.0  # a pass that was cancelled and still runs then waits for a server that hangs
_ERROR_BYTES = 4000


class ProcessEnded(Exception):
    """The child has ended. The message is the end of what its libraries wrote."""


class EngineProcess:
    """A child process. `call` from one thread at a time, `cancel` from any."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "edgespec.engines.remote_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=child_environment(),
            )
        except OSError:
            self._errors.close()
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = Pipe(self._process.stdout, self._process.stdin)  # type: ignore[arg-type]  # bufsize=0: raw files
        self._number = 0
        self._running = 0  # the number of the call that is being waited for
        self._received: queue.SimpleQueue[Answer | Report | None] = queue.SimpleQueue()
        # In a thread of its own, so that an exception such as KeyboardInterrupt never leaves half a message unread.
        self._receiver = threading.Thread(target=self._receive, daemon=True)
        self._receiver.start()

    def _receive(self) -> None:
        try:
            while True:
                self._received.put(self._pipe.receive())
        except (EOFError, OSError):
            pass
        finally:
            self._received.put(None)

    def call(self, method: str, *arguments: Any) -> Any:
        """What the engine's method returns. Raises what it raises, and ProcessEnded."""
        self._number += 1
        self._running = self._number
        try:
            self._send(Call(self._number, method, arguments))
            answer = self._answer()
        except OSError as exc:
            raise self._ended() from exc
        finally:
            self._running = 0
        if answer.error:
            raise _error(answer)
        return answer.value

    def _send(self, call: Call) -> None:
        try:
            self._pipe.send(call)
        except OSError:
            raise
        except BaseException:  # the child would take the next call for the rest of this one
            self._process.kill()
            raise

    def _answer(self) -> Answer:
        while True:
            message = self._received.get()
            if message is None:
                self._received.put(None)  # for a later call
                raise self._ended()
            if isinstance(message, Report):
                _pass_on(message)
            elif message.number == self._number:  # an earlier one: its call was interrupted
                return message

    def cancel(self) -> None:
        """Cancel the running call, if there is one. Safe in a signal handler."""
        number = self._running
        if number:
            # Not here: a signal handler may interrupt a thread that is sending.
            threading.Thread(target=self._cancel, args=(number,), daemon=True).start()

    def _cancel(self, number: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._pipe.send(Call(number, CANCEL))
        timer = threading.Timer(CANCEL_S, self._end_if_running, (number,))
        timer.daemon = True
        timer.start()

    def _end_if_running(self, number: int) -> None:
        if self._running == number:
            self._process.kill()

    def close(self) -> None:
        """End the child. Closing twice is allowed."""
        self._process.kill()
        self._process.wait()
        self._receiver.join()
        self._pipe.close()
        self._errors.close()

    def _ended(self) -> ProcessEnded:
        status = self._process.wait()
        self._errors.seek(max(self._errors.seek(0, os.SEEK_END) - _ERROR_BYTES, 0))
        lines = self._errors.read().decode("utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
        return ProcessEnded(f"status {status}: {last}")


def _error(answer: Answer) -> Exception:
    """The exception that the engine raised."""
    if answer.error == "MemoryError":
        return MemoryError(answer.value)
    kind = getattr(errors, answer.error, EngineError)
    assert issubclass(kind, EdgespecError)
    return kind(answer.value)


def _pass_on(report: Report) -> None:
    """Repeat here what the child reports."""
    if report.level:
        logger.log(report.level, "%s", report.what)
        return
    progress.report(report.done, report.total, report.what)

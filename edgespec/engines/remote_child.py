"""The child process that holds a model for a `RemoteEngine`: `python -m edgespec.engines.remote_child`.

It loads the model that its first message names, then answers one call after another. It ends with its parent.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.config.values import split_endpoint
from edgespec.engines.base import Engine
from edgespec.engines.llamacpp.rpc_probe import RpcServer
from edgespec.engines.model_use import ModelUse
from edgespec.engines.progress import reporting_to
from edgespec.engines.remote_pipe import CANCEL, LOAD, Answer, Call, Loaded, Pipe, Report
from edgespec.engines.remote_sockets import start_watching
from edgespec.errors import EdgespecError


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # libraries print there
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    pipe = Pipe(os.fdopen(os.dup(0), "rb", buffering=0), answers)
    _Child(pipe).run()


class _Child:
    """The engine and the calls that wait for it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._engine: Engine | None = None
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._current = self._cancelled = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Receive calls, and act on a cancellation at once. Ends the process when the parent is gone."""
        while True:
            try:
                call: Call = self._pipe.receive()
            except (EOFError, OSError):
                os._exit(0)
            if call.method != CANCEL:
                self._calls.put(call)
                continue
            with self._guard:
                self._cancelled = call.number
                if self._engine is not None and self._current == call.number:
                    self._engine.cancel()

    def run(self) -> None:
        while True:
            call = self._calls.get()
            self._begin(call.number)
            try:
                answer = Answer(call.number, self._result(call))
            except EdgespecError as exc:
                answer = Answer(call.number, str(exc), type(exc).__name__)
            except MemoryError as exc:
                answer = Answer(call.number, str(exc), "MemoryError")
            except Exception as exc:
                answer = Answer(call.number, f"{type(exc).__name__}: {exc}", "EngineError")
            self._pipe.send(answer)

    def _begin(self, number: int) -> None:
        with self._guard:
            self._current = number
            if self._engine is not None:
                self._engine.clear_cancel()
                if self._cancelled == number:
                    self._engine.cancel()

    def _result(self, call: Call) -> Any:
        if call.method == LOAD:
            path, servers, use = call.arguments
            self._engine = load(path, servers, use, self._pipe.send)
            return Loaded(self._engine.facts, self._engine.class_key, self._engine.most_branches)
        assert self._engine is not None
        return getattr(self._engine, call.method)(*call.arguments)


def load(path: Path, servers: tuple[RpcServer, ...], use: ModelUse, report: Callable[[Report], None]) -> Engine:
    """The model at `path` on the devices of `servers`. Raises as `LlamaCppEngine.load`."""
    from edgespec.engines.llamacpp import LlamaCppEngine
    from edgespec.engines.llamacpp.devices import add_servers
    from edgespec.engines.llamacpp.library import library, listening

    logger = logging.getLogger("edgespec")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Reporter(report))
    library()
    with listening(partial(print, file=sys.stderr, flush=True)):  # should ggml end this process, they say why
        endpoints = tuple(server.endpoint for server in servers)
        if endpoints:
            start_watching([split_endpoint(endpoint)[1] for endpoint in endpoints])
            add_servers(endpoints)
        with reporting_to(lambda done, total, what: report(Report(what, done, total))):
            return LlamaCppEngine.load(path, use, servers=servers)


class _Reporter(logging.Handler):
    """Sends the lines of the log to the parent."""

    def __init__(self, report: Callable[[Report], None]) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report(Report(record.getMessage(), level=record.levelno))


if __name__ == "__main__":
    main()

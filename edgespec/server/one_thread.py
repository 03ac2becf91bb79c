"""One thread that runs functions in order, for native code that nothing can interrupt.

Unlike the threads of `concurrent.futures`, which Python joins when it ends, this one never keeps the process alive: a
grammar that takes forever to prepare must not outlive a server that was stopped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Returned = TypeVar("Returned")


class OneThread:
    """Runs what `submit` is given, one after another; the thread starts with the first. `name`: of the thread."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, function: Callable[[], Returned]) -> Future[Returned]:
        """What `function` will have returned; where that is cancelled before it began, it is not called."""
        future: Future[Returned] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as exc:  # whoever waits for it gets it
                future.set_exception(exc)

        if self._thread.ident is None:
            self._thread.start()
        self._tasks.put(run)
        return future

    def close(self) -> None:
        """End the thread after what it was given before; does not wait for it."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

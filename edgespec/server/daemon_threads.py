"""Threads that run functions in order, for native code that nothing can interrupt.

Unlike the threads of `concurrent.futures`, which Python joins when it ends, these never keep the process alive: a
grammar that takes forever to prepare must not outlive a server that was stopped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Returned = TypeVar("Returned")


class DaemonThreads:
    """Runs what `submit` is given, in order, in up to `most` threads that start when needed. `name`: of a thread."""

    def __init__(self, name: str, most: int = 1) -> None:
        self._name, self._most = name, most
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_open = 0  # tasks that were given and are not done
        self._lock = threading.Lock()

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

        self._tasks.put(run)
        with self._lock:
            self._num_open += 1
            if len(self._threads) < min(self._num_open, self._most):
                self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
                self._threads[-1].start()
        return future

    def close(self) -> None:
        """End the threads after what they were given before; does not wait for it."""
        for _ in self._threads:
            self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # what it read may be large
            with self._lock:
                self._num_open -= 1

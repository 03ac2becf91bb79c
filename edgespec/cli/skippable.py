"""Work that nobody asked for, done while the user reads: any key, Ctrl-C or a limit of time ends it at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Generic, TypeVar

from edgespec.cli.terminal_mode import typed_unseen

T = TypeVar("T")
_LOOK_S = 0.05


class Stopping:
    """Calls what it was given when the work shall end; what is given later, at once. May be used from any thread."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.has_begun = False

    def add(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self.has_begun:
                self._calls.append(call)
                return
        call()

    def begin(self) -> None:
        with self._lock:
            self.has_begun, calls, self._calls = True, self._calls, []
        for call in calls:
            call()


class _Work(threading.Thread, Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(name="skippable", daemon=True)
        self._work = work
        self.result: T | None = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as exc:
            self.failure = exc


def unless_skipped(work: Callable[[Stopping], T], most_s: float) -> T | None:
    """What `work` returns; None where a key was pressed (which is left to be read), at Ctrl-C, or after `most_s`.

    `work` runs in another thread and registers what ends it. Raises what it raises, unless it was ended.
    """
    stopping = Stopping()
    running = _Work(lambda: work(stopping))
    until_s = monotonic() + most_s
    with _key_pressed() as has_key:
        running.start()
        try:
            while running.is_alive() and not has_key() and monotonic() < until_s:
                running.join(_LOOK_S)
        except KeyboardInterrupt:
            stopping.begin()
        if running.is_alive():
            stopping.begin()
        running.join()
    if stopping.has_begun:
        return None
    if running.failure is not None:
        raise running.failure
    return running.result


@contextmanager
def _key_pressed() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether a key was pressed in the terminal. What is typed meanwhile does not appear
    there, and waits to be read.
    """
    if not sys.stdin.isatty():
        yield lambda: False
        return
    if sys.platform == "win32":
        import msvcrt

        yield msvcrt.kbhit
        return
    import select

    with typed_unseen(by_key=True):
        yield lambda: bool(select.select([sys.stdin], [], [], 0)[0])

"""Starting and ending, as HTTP server and sidecar share it: the model is loaded in a thread, signals end both."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if sys.platform == "win32":
    _SIGNALS.append(signal.SIGBREAK)  # the only one that a program can send to another one there


class Loader:
    """Runs `load` in a thread that does not keep the process alive; `on_end` is called in it afterwards.

    `failure`: what it raised.
    """

    def __init__(self, load: Callable[[], None], on_end: Callable[[Loader], object]) -> None:
        self.failure: BaseException | None = None
        self._load, self._on_end = load, on_end
        threading.Thread(target=self._run, name="edgespec-load", daemon=True).start()

    def _run(self) -> None:
        try:
            self._load()
        except BaseException as exc:  # raised again by whoever waits for the model
            self.failure = exc
        self._on_end(self)


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within the block SIGINT and SIGTERM call `handler`. Only the main thread can do that: elsewhere, nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)

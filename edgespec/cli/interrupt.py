"""Ctrl-C while an answer is being made: the first one ends the answer, a second one the program."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Interruption:
    """`happened` turns true with the first Ctrl-C; the loop that prints events looks at it between two of them."""

    happened: bool = False


@contextmanager
def stops(cancel: Callable[[], None]) -> Iterator[Interruption]:
    """Within the block, Ctrl-C calls `cancel` instead of raising; a second one raises KeyboardInterrupt."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if interruption.happened:
            raise KeyboardInterrupt
        interruption.happened = True
        cancel()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with _called_at_once(cancel):
            yield interruption
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _called_at_once(cancel: Callable[[], None]) -> Iterator[None]:
    """Within the block, Ctrl-C calls `cancel` from a thread of its own, during a library's call too.

    Python runs handlers of signals only when such a call returns, and a pass over a long prompt may take half a minute.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while arrived := reader.recv(64):
            if signal.SIGINT in arrived:
                cancel()

    listener = threading.Thread(target=listen, name="ctrl-c", daemon=True)
    with reader, writer:
        listener.start()
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous)
            writer.close()
            listener.join()

"""Ctrl-C while an answer is being made: the first one ends the answer, a second one the program."""

from __future__ import annotations

import signal
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
        yield interruption
    finally:
        signal.signal(signal.SIGINT, previous)

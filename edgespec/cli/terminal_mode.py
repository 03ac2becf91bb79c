"""How a terminal treats what is typed while the program does something else than read it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def typed_unseen() -> Iterator[None]:
    """Within the block, what is typed does not appear in what is printed, and waits to be read.

    After Ctrl-Z the shell sets the terminal back, so this is done again when the program goes on in the foreground.
    Standard input must be a terminal, and not Windows'.
    """
    assert sys.platform != "win32"
    import termios

    terminal = sys.stdin.fileno()
    usual = termios.tcgetattr(terminal)
    unseen = usual.copy()
    unseen[3] &= ~termios.ECHO

    def set_unseen(_number: int = 0, _frame: FrameType | None = None) -> None:
        if _is_in_front(terminal):  # a change from the background would stop the program
            termios.tcsetattr(terminal, termios.TCSANOW, unseen)

    is_main = threading.current_thread() is threading.main_thread()  # others cannot receive signals
    before = signal.signal(signal.SIGCONT, set_unseen) if is_main else None
    try:
        set_unseen()
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGCONT, before or signal.SIG_DFL)
        termios.tcsetattr(terminal, termios.TCSANOW, usual)


def _is_in_front(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # another terminal than the one that this program belongs to, where there is no background
        return True

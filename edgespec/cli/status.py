"""Says what a command is waiting for, where that takes long: a line that vanishes in a terminal, one line elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer

import click
from rich.console import Console
from rich.status import Status
from rich.text import Text

from edgespec.cli import has_escapes
from edgespec.cli.terminal import verbosity

OnProgress = Callable[[int, int, str], None]
PATIENCE_S, LOG_PATIENCE_S = 1.0, 10.0  # before anything is said to a person, and to a log


class _Waiting:
    """What is being done at present, and how it is shown; a timer's thread begins to show it."""

    def __init__(self, text: str) -> None:
        self._what = self._text = text
        self._lock = Lock()
        self._status: Status | None = None
        self._has_said = self._is_over = False
        self.is_live = sys.stderr.isatty() and has_escapes()

    def on_progress(self, done: int, total: int, what: str) -> None:
        """`done` of `total` steps of `what`; a log gets a line when that changes, and none for the steps."""
        with self._lock:
            is_new, self._what = what != self._what, what
            self._text = f"{what}: {done} of {total}" if total else what
            if self._status is not None:
                self._status.update(self._shown)
            elif self._has_said and is_new:
                click.echo(f"note: {what}", err=True)

    def show(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._has_said = True
            if self.is_live:
                self._status = Console(stderr=True, highlight=False).status(
                    self._shown, spinner="line", refresh_per_second=4
                )
                self._status.start()
            else:
                click.echo(f"note: {self._what}", err=True)

    @property
    def _shown(self) -> Text:
        return Text(f"{self._text} (Ctrl-C stops)")

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            if self._status is not None:
                self._status.stop()
                self._status = None


_waiting: list[_Waiting] = []


@contextmanager
def waiting(text: str) -> Iterator[OnProgress]:
    """For the time of the block: after a second in a terminal (ten in a log) `text` is shown, or what is done since.

    Yields a function that takes (steps done, steps in all, what is being done). With --quiet nothing is shown.
    """
    one = _Waiting(text)
    if verbosity() == "quiet":
        yield lambda done, total, what: None
        return
    timer = Timer(PATIENCE_S if one.is_live else LOG_PATIENCE_S, one.show)
    timer.daemon = True
    timer.start()
    _waiting.append(one)
    try:
        yield one.on_progress
    finally:
        _waiting.remove(one)
        timer.cancel()
        one.end()


def stop_waiting() -> None:
    """Take down what is shown of a wait in another thread that this process does not wait for any more."""
    for one in list(_waiting):
        one.end()


def report_progress(text: str) -> bool:
    """Show `text` as what is being waited for; False where nothing is."""
    if not _waiting:
        return False
    _waiting[-1].on_progress(0, 0, text)
    return True

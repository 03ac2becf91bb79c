"""Says what a command is waiting for: a line that vanishes in a terminal, one line for each new thing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

from edgespec.cli import has_escapes
from edgespec.cli.terminal import detail, verbosity

OnProgress = Callable[[int, int, str], None]
_waiting: list[OnProgress] = []
_shown: list[Status] = []


@contextmanager
def waiting(text: str) -> Iterator[OnProgress]:
    """For the time of the block `text` is shown in a terminal, or what is done since; with --verbose in a log, too.

    Yields a function that takes (steps done, steps in all, what is being done). With --quiet nothing is shown.
    """
    if verbosity() == "quiet":
        yield lambda done, total, what: None
        return
    seen = {text}
    status = None
    if sys.stderr.isatty() and has_escapes():
        status = Console(stderr=True, highlight=False).status(_line(text), spinner="line", refresh_per_second=4)
        status.start()
        _shown.append(status)

    def on_progress(done: int, total: int, what: str) -> None:
        if status is not None:
            status.update(_line(f"{what}: {done} of {total}" if total else what))
        elif what not in seen:
            seen.add(what)
            detail(what)

    _waiting.append(on_progress)
    try:
        yield on_progress
    finally:
        _waiting.remove(on_progress)
        if status is not None:
            _shown.remove(status)
            status.stop()


def _line(text: str) -> Text:
    return Text(f"{text} (Ctrl-C stops)")


def stop_waiting() -> None:
    """Take down what is shown of a wait in another thread that this process does not wait for any more."""
    for status in list(_shown):
        status.stop()


def report_progress(text: str) -> bool:
    """Show `text` as what is being waited for; False where nothing is."""
    if not _waiting:
        return False
    _waiting[-1](0, 0, text)
    return True

"""What a person sees beside the result, on stderr, and Ctrl-C: notes, errors, waits.

Escape codes only where they work.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Literal

import click

from edgespec.cli import has_escapes, printable

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text

    from edgespec.formats.manifest import ModelFile

Verbosity = Literal["quiet", "normal", "verbose"]
OnProgress = Callable[[int, int, str], None]
_verbosity: Verbosity = "normal"  # of the command that is running, for all of its threads
_waiting: list[OnProgress] = []
_shown: list[Status] = []


def set_verbosity(chosen: Verbosity) -> None:
    """Set to "normal" where a command begins. Raises UsageError where the other one was chosen before."""
    global _verbosity
    if "normal" not in (chosen, _verbosity) and chosen != _verbosity:
        raise click.UsageError("--verbose and --quiet contradict each other: keep one")
    _verbosity = chosen


def verbosity() -> Verbosity:
    return _verbosity


def reply(text: str) -> None:
    """Dimmed lines on stderr that answer what the user typed"""
    text = printable(text)
    click.echo(click.style(text, dim=True) if has_escapes() else text, err=True)


def note(text: str) -> None:
    """A line beside the result, unless --quiet is given."""
    if verbosity() != "quiet":
        reply(text)


def detail(text: str) -> None:
    """A line that only --verbose shows."""
    if verbosity() == "verbose":
        reply(f"note: {text}")


def complain(text: str) -> None:
    """One error line on stderr."""
    click.echo(printable(f"error: {' '.join(text.split())}"), err=True)


def is_interactive() -> bool:
    """Whether a person types and looks on."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def counted(count: int, noun: str) -> str:
    """'1 exchange', '2 exchanges'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def runner(file: ModelFile) -> str:
    """What runs a model file, for people."""
    return "llama.cpp" if file.engine == "llamacpp" else "edgespec's kernels" if file.is_gguf else "ONNX Runtime"


# -- what a command is waiting for: a line that vanishes in a terminal, one line for each new thing elsewhere


@contextmanager
def waiting(text: str) -> Iterator[OnProgress]:
    """For the time of the block `text` is shown in a terminal, or what is done since; with --verbose in a log, too.

    Yields a function that takes (steps done, steps in all, what is being done). With --quiet nothing is shown.
    """
    if verbosity() == "quiet":
        yield lambda done, total, what: None
        return
    from rich.console import Console  # takes as long as all else of a command that waits for nothing
    from rich.text import Text

    def shown(what: str) -> Text:
        return Text(f"{what} (Ctrl-C stops)")

    seen = {text}
    status = None
    if sys.stderr.isatty() and has_escapes():
        status = Console(stderr=True, highlight=False).status(shown(text), spinner="line", refresh_per_second=4)
        status.start()
        _shown.append(status)

    def on_progress(done: int, total: int, what: str) -> None:
        if status is not None:
            status.update(shown(f"{what}: {done} of {total}" if total else what))
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


def stop_waiting() -> None:
    """Take down what is shown of a wait in another thread that this process does not wait for any more."""
    for status in list(_shown):
        status.stop()


def report_progress(text: str) -> None:
    """Show `text` as what is being waited for, if anything is."""
    if _waiting:
        _waiting[-1](0, 0, text)


# -- Ctrl-C while an answer is being made: the first one ends the answer, a second one the program


@contextmanager
def stops(cancel: Callable[[], None]) -> Iterator[threading.Event]:
    """Within the block, Ctrl-C calls `cancel` instead of raising, and sets the event, at which the block looks and does
    not wait for it: the handler runs in its thread. A second one raises KeyboardInterrupt.

    `cancel` is called from a thread of its own, too: Python runs handlers of signals only when a library's call
    returns, and a pass over a long prompt may take half a minute.
    """
    interruption = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if interruption.is_set():
            raise KeyboardInterrupt
        interruption.set()
        cancel()

    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while arrived := reader.recv(64):
            if signal.SIGINT in arrived:
                cancel()

    listener = threading.Thread(target=listen, name="ctrl-c", daemon=True)
    with reader, writer:
        listener.start()
        handler = signal.signal(signal.SIGINT, on_interrupt)
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield interruption
        finally:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGINT, handler)
            writer.close()
            listener.join()

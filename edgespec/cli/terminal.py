"""What a person sees beside the result, on stderr, and Ctrl-C: notes, errors, counters, the configuration, waits.

Escape codes only where they work.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Literal

import click

from edgespec.cli import has_escapes, printable
from edgespec.config.options import GenerateOptions
from edgespec.config.values import LOSSY

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text

    from edgespec.config.options import Sampling
    from edgespec.formats.manifest import ModelFile
    from edgespec.reports import Stats
    from edgespec.runtime import Model  # commands that load nothing do not pay for these imports

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


def configuration(model: Model, sampling: Sampling, options: GenerateOptions, *, whole: bool = True) -> str:
    """The effective configuration in one line; else of what runs the model only what changes a text, or rules out
    speculation.
    """
    facts, engine = model.target.facts, runner(model.pair.files["target"])
    drafter = options.drafter or model.drafter_name
    rule = options.verify or model.options.verify
    if not whole:
        parts = [f"{model.pair.name} on {engine}" + (f", {facts.device}" if facts.device != "cpu" else "")]
        if not facts.writes:
            parts.append("embeddings only")
        elif not facts.can_speculate:
            parts.append("no speculation (the model cannot roll back)")
        elif drafter == "none":
            parts.append("drafter none")
        return " | ".join([*parts, *([f"verify {rule} (changes the text)"] if rule in LOSSY else [])])
    length = model.options.draft_length if options.draft_length is None else options.draft_length
    mode = "fastest mode" if facts.pinned_class is None else "reproducible"
    return " | ".join(
        (
            model.pair.name,
            f"{engine} on {facts.device}, threads {facts.threads}, context {facts.context_length}",
            f"drafter {drafter}" if drafter == "none" else f"drafter {drafter}, draft length {length}, rule {rule}",
            mode if rule == "coupled" else "not reproducible",
            "random seeds" if sampling.seed is None else f"seed {sampling.seed}",
        )
    )


def length_note(stats: Stats, options: GenerateOptions, *, in_chat: bool = False) -> str | None:
    """Why the answer stops in the middle, and how to get more; None where the model ended it."""
    if stats.finish_reason != "length":
        return None
    if stats.new_tokens == options.max_tokens:
        more = "/continue goes on, /set max-tokens gives more" if in_chat else "a larger -n (--max-tokens) gives more"
        return f"cut at {counted(stats.new_tokens, 'token')}: {more}"
    return "cut: the context is full; a larger -c (--ctx-size) gives more"


def stats_lines(stats: Stats) -> Iterable[str]:
    reused = f" ({stats.reused_tokens} cached)" if stats.reused_tokens else ""
    yield (
        f"{counted(stats.new_tokens, 'token')} at {stats.tokens_per_second:.1f} tokens/s, "
        f"prompt {stats.prompt_tokens}{reused} in {stats.prefill_s:.2f} s"
    )
    if stats.drafted_tokens:
        yield (
            f"{stats.target_passes} target passes, {stats.drafted_tokens} drafted, {stats.accepted_tokens} accepted "
            f"({stats.acceptance_rate:.0%}), {stats.mean_accepted_length:.2f} tokens per pass"
        )
    else:
        yield f"{stats.target_passes} target passes, nothing drafted"
    planned = f" of {stats.planned_bytes / 1e6:.0f} planned" if stats.planned_bytes else ""
    yield (
        f"draft {stats.draft_s:.3f} s, verify {stats.verify_s:.3f} s, overhead {stats.overhead_s:.3f} s; "
        f"peak memory {stats.peak_rss_bytes / 1e6:.0f} MB{planned}"
    )


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

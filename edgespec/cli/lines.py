"""Reading what the user says: line by line, with editing in a terminal, plainly from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import click

from edgespec.errors import PromptError
from edgespec.formats.files import user_folder

ReadLine = Callable[[str], str]
FENCE = '"""'


def is_interactive() -> bool:
    """Whether a person types and looks on."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def line_reader(commands: Sequence[str], tell: Callable[[str], None]) -> ReadLine:
    """A function that shows a prompt and reads one line; it raises EOFError at the end of input."""
    return _terminal_reader(commands, tell) if is_interactive() else _plain_reader()


def read_message(read_line: ReadLine) -> str:
    '''One message: a line, or all lines from one that begins with """ to one that ends with it.

    Raises EOFError at the end of input, PromptError when that comes inside a message.
    '''
    line = read_line("> ")
    if not line.startswith(FENCE):
        return line
    lines = [line[len(FENCE) :]]
    while not lines[-1].rstrip().endswith(FENCE):
        try:
            lines.append(read_line("... "))
        except EOFError:
            raise PromptError(f"the message that begins with {FENCE} never ends: close it with {FENCE}") from None
    lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
    return "\n".join(lines).strip("\n")


def _terminal_reader(commands: Sequence[str], tell: Callable[[str], None]) -> ReadLine:
    # The answer to a cursor position request that comes late would appear as typed text.
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    from prompt_toolkit import PromptSession  # a pipe never needs it
    from prompt_toolkit.completion import WordCompleter

    from edgespec.cli.history import FileHistory

    history = FileHistory(user_folder("state") / "chat-history.jsonl", tell)
    completer = WordCompleter(list(commands), sentence=True)
    session: PromptSession[str] = PromptSession(
        history=history, completer=completer, complete_while_typing=False, enable_history_search=True
    )
    return session.prompt


def _plain_reader() -> ReadLine:
    asks = sys.stdin.isatty()

    def read(prompt: str) -> str:
        if asks:
            click.echo(prompt, nl=False, err=True)
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return line.decode("utf-8", errors="replace").rstrip("\r\n")

    return read

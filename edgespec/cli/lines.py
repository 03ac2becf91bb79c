"""Reads the user's messages: with line editing in a terminal, line by line from a pipe."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import click

from edgespec.cli import has_escapes
from edgespec.cli.terminal import note
from edgespec.cli.terminal_mode import typed_unseen
from edgespec.errors import ConfigError, PromptError
from edgespec.platform.files import expanded, read_text, user_folder

FENCE = '"""'
_COMMAND = re.compile(r"/[^/\s]*(\s|$)")  # and not the path of a file
_HINT = "Type a message. /help lists commands, Ctrl-D leaves"  # in the first empty prompt


class ReadLine(Protocol):
    """Shows a prompt and reads one line, in which `default` stands already where it can be edited.

    Raises EOFError at the end of input.
    """

    def __call__(self, prompt: str, default: str = "") -> str: ...


def is_interactive() -> bool:
    """Whether a person types and looks on."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def typing_unseen() -> AbstractContextManager[None]:
    """Within the block, what is typed in a terminal does not appear in what is printed; the next prompt shows it."""
    return nullcontext() if not is_interactive() or sys.platform == "win32" else typed_unseen()


def line_reader(commands: Sequence[str]) -> ReadLine:
    """Line editing in a terminal; lines as they come from elsewhere."""
    has_editor = is_interactive() and os.environ.get("TERM") != "dumb"
    if has_editor:
        return _terminal_reader(commands)
    if is_interactive():
        note(_HINT)
    return _plain_reader()


def file_text(name: str, source: str) -> str:
    """The text of a file for a message, without the end of its last line. Raises ConfigError naming `source`."""
    try:
        text = read_text(expanded(name)).removesuffix("\n")
    except (OSError, ValueError) as exc:  # ValueError: no UTF-8, a NUL in the name
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{source}: the file {name!r} cannot be read: {reason}") from exc
    if not text.strip():
        raise ConfigError(f"{source}: the file {name!r} holds no text")
    return text


def read_message(read_line: ReadLine, default: str = "") -> tuple[str, bool]:
    '''One message, and whether it is a command: a line that begins with a slash and a word.

    Lines from one that begins with """ to one that ends with it are one message, whatever they say. Raises EOFError at
    the end of input, PromptError when that comes inside a message. `default`: a message to edit.
    '''
    line = read_line("> ", f"{FENCE}{default}{FENCE}" if _COMMAND.match(default) else default)
    if not line.startswith(FENCE):
        return line, _COMMAND.match(line) is not None
    lines = [line[len(FENCE) :]]
    while not lines[-1].rstrip().endswith(FENCE):
        try:
            lines.append(read_line("... "))
        except EOFError:
            raise PromptError(f"the message that begins with {FENCE} never ends: close it with {FENCE}") from None
    lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
    return "\n".join(lines).strip("\n"), False


def _terminal_reader(commands: Sequence[str]) -> ReadLine:
    # The answer to a cursor position request that comes late would appear as typed text.
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    from prompt_toolkit import PromptSession  # a pipe never needs it
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.key_binding import KeyBindings

    from edgespec.cli.history import open_history

    keys = KeyBindings()
    # Enter sends. Ctrl-J cannot mean anything else: as Enter it comes where a line was typed before the prompt.
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession(
        key_bindings=keys,
        history=open_history(user_folder("state") / "chat-history"),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        enable_history_search=True,
        enable_suspend=True,  # Ctrl-Z, as it does while an answer is written
    )
    hints, colour = iter([_HINT]), "fg:ansibrightblack" if has_escapes() else ""

    def read(prompt: str, default: str = "") -> str:
        return session.prompt(prompt, default=default, placeholder=FormattedText([(colour, next(hints, ""))]))

    return read


def _plain_reader() -> ReadLine:
    asks = sys.stdin.isatty()

    def read(prompt: str, default: str = "") -> str:
        if asks:
            click.echo(prompt, nl=False, err=True)
        line = sys.stdin.buffer.readline()
        if not line:
            if asks:
                click.echo(err=True)
            raise EOFError
        try:
            return line.decode().rstrip("\r\n")
        except UnicodeDecodeError as exc:
            raise PromptError(f"the message is not UTF-8 text: {exc.reason} at byte {exc.start} of its line") from exc

    return read

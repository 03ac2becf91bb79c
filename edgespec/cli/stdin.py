"""What a user types or pipes in: messages of a chat, with line editing in a terminal, and text for `generate`."""

from __future__ import annotations

import os
import re
import select
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli import has_escapes
from edgespec.cli.terminal import counted, note
from edgespec.errors import ConfigError, PromptError
from edgespec.platform.files import MAX_TEXT_BYTES, given_text, user_folder

if TYPE_CHECKING:
    from prompt_toolkit.history import History


FENCE = '"""'
_COMMAND = re.compile(r"/[^/\s]*(\s|$)")  # and not the path of a file
FIRST_BYTE_S = 10.0
_HINT = "Type a message. /help lists commands, Ctrl-D leaves"  # in the first empty prompt


ReadLine = Callable[[str], str]
"""Shows a prompt and reads one line. Raises EOFError at the end of input."""


def is_interactive() -> bool:
    """Whether a person types and looks on."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def line_reader(commands: Sequence[str]) -> ReadLine:
    """Line editing in a terminal; lines as they come from elsewhere."""
    has_editor = is_interactive() and os.environ.get("TERM") != "dumb"
    if has_editor:
        return _terminal_reader(commands)
    if is_interactive():
        note(_HINT)
    return _plain_line


def file_text(name: str, source: str) -> str:
    """The text of a file for a message, without the end of its last line. Raises ConfigError naming `source`."""
    text = given_text(name, source).removesuffix("\n")
    if not text.strip():
        raise ConfigError(f"{source}: the file {name!r} holds no text")
    return text


def read_message(read_line: ReadLine) -> tuple[str, bool]:
    '''One message, and whether it is a command: a line that begins with a slash and a word.

    Lines from one that begins with """ to one that ends with it are one message, whatever they say. Raises EOFError at
    the end of input, PromptError when that comes inside a message.
    '''
    line = read_line("> ")
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

    def read(prompt: str) -> str:
        return session.prompt(prompt, placeholder=FormattedText([(colour, next(hints, ""))]))

    return read


def _plain_line(prompt: str) -> str:
    if not (line := sys.stdin.buffer.readline()):
        raise EOFError
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as exc:
        raise PromptError(f"the message is not UTF-8 text: {exc.reason} at byte {exc.start} of its line") from exc


def open_history(path: Path) -> History:
    """The lines typed in earlier chats, in a file readable for its owner only; in memory where it cannot be used."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError as exc:
        note(f"note: input history is off: {path}: {exc.strerror}")
        return InMemoryHistory()
    return FileHistory(str(path))


# -- text for `generate`, on standard input
#
# With -p nobody has said that there is such text, so only a file or a pipe is read, as `program < FILE` and `other |
# program` make them: a terminal, /dev/null and a socket (what Node.js gives its children) are not. A pipe may also be
# one that a supervisor never writes to and never closes, so its first byte is waited for only so long.


def whole_input() -> str:
    """All of standard input. Raises PromptError for what is no text."""
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise PromptError(f"standard input has more than {MAX_TEXT_BYTES >> 20} MiB: give less text")
    try:
        return data.decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as exc:
        raise PromptError(f"standard input is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc


def text_behind() -> str:
    """What a file or a pipe on standard input holds; empty where there is neither. Raises PromptError."""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):  # closed, or no file at all
        return ""
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        return ""
    if os.name != "nt" and not select.select([descriptor], [], [], FIRST_BYTE_S)[0]:
        note(f"no data on standard input in {FIRST_BYTE_S:.0f} s: answering without it (< /dev/null does at once)")
        return ""
    text = whole_input()
    if not text.strip():
        return ""
    note(f"standard input: {counted(len(text), 'character')} behind the prompt")
    return text

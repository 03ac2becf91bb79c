"""What a user types or pipes in: messages of a chat, with line editing in a terminal, and text for `generate`."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import click

from edgespec.cli import has_escapes
from edgespec.cli.terminal import counted, note
from edgespec.errors import ConfigError, PromptError
from edgespec.platform.files import MAX_TEXT_BYTES, expanded, read_text, user_folder

if TYPE_CHECKING:
    from prompt_toolkit.history import History


FENCE = '"""'
_COMMAND = re.compile(r"/[^/\s]*(\s|$)")  # and not the path of a file
FIRST_BYTE_S, PATIENCE_S = 10.0, 1.0
_INSTEAD = "< /dev/null answers without it"
_HINT = "Type a message. /help lists commands, Ctrl-D leaves"  # in the first empty prompt


class ReadLine(Protocol):
    """Shows a prompt and reads one line. Raises EOFError at the end of input."""

    def __call__(self, prompt: str) -> str: ...


def is_interactive() -> bool:
    """Whether a person types and looks on."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def typing_unseen() -> Iterator[None]:
    """Within the block, what is typed in a terminal does not appear in what is printed; the next prompt shows it."""
    if not is_interactive() or sys.platform == "win32":
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    usual = termios.tcgetattr(terminal)
    unseen = usual.copy()
    unseen[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(terminal, termios.TCSANOW, unseen)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, usual)


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


def _plain_reader() -> ReadLine:
    asks = sys.stdin.isatty()

    def read(prompt: str) -> str:
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


def open_history(path: Path) -> History:
    """The lines typed in earlier chats, in a file readable for its owner only; in memory where it cannot be used."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class SafeHistory(FileHistory):
        """A file that can no longer be written, as on a full disk, costs the line in it and nothing else."""

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):
                super().store_string(string)

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError as exc:
        note(f"note: input history is off: {path}: {exc.strerror}")
        return InMemoryHistory()
    return SafeHistory(str(path))


# -- text for `generate`, on standard input
#
# With -p nobody has said that there is such text, so only a file or a pipe is read, as `program < FILE` and `other |
# program` make them: a terminal, /dev/null and a socket (what Node.js gives its children) are not. A pipe may also be
# one that a supervisor never writes to and never closes. So the first byte is waited for as long as a program before
# this one usually needs for it, and what is done is said both ways: nothing is dropped silently, and nothing hangs.


def whole_input() -> str:
    """All of standard input. Raises PromptError for what is no text."""
    return _decoded(sys.stdin.buffer.read())


def text_behind() -> str:
    """What a file or a pipe on standard input holds; empty where there is neither. Raises PromptError."""
    try:
        descriptor = sys.stdin.fileno()
        found = os.fstat(descriptor)
    except (OSError, ValueError):  # closed, or no file at all
        return ""
    if stat.S_ISREG(found.st_mode):
        data = sys.stdin.buffer.read() if found.st_size <= MAX_TEXT_BYTES else _too_long()
    elif stat.S_ISFIFO(found.st_mode):
        data = _of_pipe(descriptor)
    else:
        return ""
    text = _decoded(data)
    if not text.strip():
        return ""
    note(f"standard input: {counted(len(text), 'character')} behind the prompt")
    return text


def _of_pipe(descriptor: int) -> bytes:
    """All that comes, if the first of it comes in time; read in a thread, as Windows cannot wait for a pipe."""
    found, has_begun = bytearray(), threading.Event()

    def read() -> None:
        try:
            while len(found) <= MAX_TEXT_BYTES and (chunk := os.read(descriptor, 1 << 16)):
                found.extend(chunk)
                has_begun.set()
        finally:
            has_begun.set()

    reader = threading.Thread(target=read, name="standard-input", daemon=True)
    reader.start()
    if not has_begun.wait(PATIENCE_S):
        note(f"waiting for standard input, a pipe without data so far ({_INSTEAD})")
        if not has_begun.wait(FIRST_BYTE_S - PATIENCE_S):
            note(f"no data on standard input in {FIRST_BYTE_S:.0f} s: answering without it ({_INSTEAD} at once)")
            return b""
    while reader.is_alive():
        reader.join(0.2)  # with a limit, so that Ctrl-C comes through on Windows
    return bytes(found) if len(found) <= MAX_TEXT_BYTES else _too_long()


def _too_long() -> NoReturn:
    raise PromptError(f"standard input has more than {MAX_TEXT_BYTES >> 20} MiB: give less text")


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as exc:
        raise PromptError(f"standard input is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc

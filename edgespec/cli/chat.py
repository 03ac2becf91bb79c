"""`edgespec chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import FilePath, as_typed, has_escapes
from edgespec.cli.main import exit_code
from edgespec.cli.models import fetched
from edgespec.cli.options import SettingsCommand, resolve_settings, settings_options
from edgespec.cli.session import Chat, SavedChat, open_session, require_chat_template, show_beginning
from edgespec.cli.slash import COMMANDS, file_text, run_slash
from edgespec.cli.terminal import complain, is_interactive, note, reply, verbosity
from edgespec.config.sources import Settings
from edgespec.errors import EdgespecError, PromptError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import MANIFEST
from edgespec.installation import has_engine, install_command
from edgespec.kernels.library import library_path
from edgespec.loading.catalogue import entries
from edgespec.loading.registry import models_folder, registered_folders
from edgespec.platform import disk_cache
from edgespec.platform.files import user_folder

if TYPE_CHECKING:
    from prompt_toolkit.history import History

FIRST = "smollm2-135m"
CHOSEN_HERE = "chosen, as no model was named"  # where /show says the model comes from
_KEY = disk_cache.key_of("first model", FIRST)
FENCE = '"""'
_COMMAND = re.compile(r"/[^/\s]*(\s|$)")  # and not the path of a file
_HINT = "Type a message. /help lists commands, Ctrl-D leaves"  # in the first empty prompt
ReadLine = Callable[[str], str]
"""Shows a prompt and reads one line. Raises EOFError at the end of input."""


@click.command(cls=SettingsCommand)
@settings_options("load", "generate", "sampling", "session", hidden=("chat_template",))
@click.option(
    "--session",
    "session_path",
    type=FilePath(dir_okay=False),
    metavar="FILE",
    help="Keep the conversation in FILE, or continue it",
)
@click.option("-f", "--file", "first_file", metavar="FILE", help="Begin with the text of FILE as the message")
def command(
    model_name: str | None, config_file: Path | None, session_path: Path | None, first_file: str | None, **given: Any
) -> int:
    """Talk to a model. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.

    MODEL is a name (demo), a GGUF or ONNX file, or a folder with one.
    """
    first = None if first_file is None else file_text(first_file, "--file")
    settings = settings_with_model(given, model_name, config_file)
    saved = None if session_path is None else SavedChat(session_path)
    with keeping_headers():
        require_chat_template(settings, is_chat=True)
        session = open_session(settings, remembers=True)
    chat = Chat(session)
    with ExitStack() as at_end:
        at_end.callback(lambda: chat.session.model.close())
        show_beginning(session)
        if saved is not None:
            saved.begin(chat)
            at_end.callback(saved.end, chat)
        return _run(chat, saved, first)


def _run(chat: Chat, saved: SavedChat | None, first: str | None) -> int:
    """Answer `first`, then read and answer until the end.

    The exit code of a pipe is that of its last failed message.
    """
    read_line, code = line_reader(), 0
    while True:
        try:
            if first is not None:
                message, is_command, first = first, False, None
            else:
                message, is_command = read_message(read_line)
            if is_command:
                run_slash(chat, message)
            elif message.strip():
                chat.say(message)
            if saved is not None:
                saved.keep(chat)
        except EOFError:
            return code
        except KeyboardInterrupt:
            if not is_interactive():
                raise
            reply("Ctrl-D or /exit leaves")
        except EdgespecError as exc:
            complain(as_typed(exc))
            code = 0 if is_interactive() else exit_code(exc)


# -- what is typed: with line editing in a terminal, lines as they come from elsewhere


def line_reader() -> ReadLine:
    if is_interactive() and os.environ.get("TERM") != "dumb":
        return _terminal_reader()
    if is_interactive():
        note(_HINT)
    return _plain_line


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


def _terminal_reader() -> ReadLine:
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
        completer=WordCompleter(list(COMMANDS), sentence=True),
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


# -- which model, where none was named: the one got last; else a small real one, asked for once and in a terminal only;
# else the demo


def settings_with_model(given: Mapping[str, Any], model_name: str | None, config_file: Path | None) -> Settings:
    """As `resolve_settings`, with a model chosen where none is named."""
    settings = resolve_settings(given, model_name, config_file)
    name = first_model(settings)
    return settings if name is None else settings.above({"model": name}, CHOSEN_HERE)


def first_model(settings: Settings) -> str | None:
    """The model to chat with where the settings name none and there is a better one than the demo; else None.

    Asks and fetches where that is possible and was not declined before; what fails is said, and the demo serves.
    """
    if settings.values.get("model") is not None or settings.values.get("engine", "auto") != "auto":
        return None
    return _usable() or _fetched()


def _runs_ggufs() -> bool:
    return library_path() is not None or has_engine("llamacpp")


def _usable() -> str | None:
    """The model that was pulled or added last, if any."""
    own = [folder for folder in registered_folders().values() if folder.parent == models_folder()]
    if not own or not _runs_ggufs():
        return None
    return max(own, key=lambda folder: (folder / MANIFEST).stat().st_mtime).name


def _fetched() -> str | None:
    if not is_interactive() or verbosity() == "quiet" or disk_cache.get("asked", _KEY, bool) is not None:
        return None
    if not _runs_ggufs():
        note(f"no model named: using the demo. To get a real model, first run {install_command('llamacpp')}")
        return None
    entry = entries()[FIRST]
    size = entry.guessed_bytes() / 1e6
    offer = (
        f"No model named. {entry.description} (about {size:.0f} MB, {entry.licence}) is small: it talks about "
        "anything and knows little; without it, the demo answers, which knows restaurants, travel and the like."
    )
    click.echo(offer, err=True)
    if not click.confirm(f"Get {FIRST}?", default=True, err=True):
        disk_cache.put("asked", _KEY, False)
        note(f"edgespec pull {FIRST} gets it later")
        return None
    try:
        fetched(FIRST, wants_draft=False)
    except EdgespecError as exc:
        note(f"{exc}\nusing the demo for now")
        return None
    return _usable()

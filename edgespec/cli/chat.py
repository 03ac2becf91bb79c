"""`edgespec chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgespec.cli import FilePath, as_typed
from edgespec.cli.dialogue import Chat, SavedChat
from edgespec.cli.first_model import CHOSEN_HERE, first_model
from edgespec.cli.main import exit_code
from edgespec.cli.options import GroupedOption, SettingsCommand, resolve_settings, settings_options
from edgespec.cli.session import open_session, require_chat_template, show_beginning
from edgespec.cli.slash import COMMANDS, run_slash
from edgespec.cli.stdin import ReadLine, file_text, is_interactive, line_reader, read_message
from edgespec.cli.terminal import complain, reply
from edgespec.config.sources import Settings
from edgespec.errors import EdgespecError


@click.command(cls=SettingsCommand)
@settings_options("load", "generate", "sampling", "session", hidden=("chat_template",))
@click.option(
    "--session",
    "session_path",
    cls=GroupedOption,
    group="Answer",
    type=FilePath(dir_okay=False),
    metavar="FILE",
    help="Keep the conversation in FILE, or continue it",
)
@click.option(
    "-f",
    "--file",
    "first_file",
    cls=GroupedOption,
    group="Answer",
    metavar="FILE",
    help="Begin with the text of FILE as the message",
)
def command(
    model_name: str | None, config_file: Path | None, session_path: Path | None, first_file: str | None, **given: Any
) -> int:
    """Talk to a model. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.

    MODEL is a name (demo), a GGUF or ONNX file, or a folder with one.
    """
    first = None if first_file is None else file_text(first_file, "--file")
    settings = resolve_settings(given, model_name, config_file)
    if (name := first_model(settings)) is not None:
        settings = resolve_settings(given, name, config_file)
        settings = Settings(settings.values, {**settings.sources, "model": CHOSEN_HERE})
    saved = None if session_path is None else SavedChat(session_path)
    require_chat_template(settings, is_chat=True)
    session = open_session(settings, remembers=True)
    chat = Chat(session)
    try:
        show_beginning(session)
        if saved is None:
            return _run(chat, line_reader(list(COMMANDS)), first=first)
        saved.begin(chat, session.shown.system)
        try:
            return _run(chat, line_reader(list(COMMANDS)), saved, first)
        finally:
            saved.end(chat)
    finally:
        session.model.close()


def _run(chat: Chat, read_line: ReadLine, saved: SavedChat | None = None, first: str | None = None) -> int:
    """Answer `first`, then read and answer until the end.

    The exit code of a pipe is that of its last failed message.
    """
    code = 0
    while True:
        try:
            if first is not None:
                message, is_command, first = first, False, None
            else:
                message, is_command = _next_message(chat, read_line)
            if is_command:
                if not run_slash(chat, message):
                    return code
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


def _next_message(chat: Chat, read_line: ReadLine) -> tuple[str, bool]:
    """As `read_message`; an edit that ends in no message leaves the conversation as it is."""
    found = None
    try:
        found = read_message(read_line, chat.edited or "")
        return found
    finally:
        if chat.edited is not None and (found is None or found[1] or not found[0].strip()):
            chat.end_edit()

"""`edgespec chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from edgespec.cli import FilePath, as_typed
from edgespec.cli.main import exit_code
from edgespec.cli.options import GroupedOption, SettingsCommand, resolve_settings, settings_options
from edgespec.cli.pull import fetched
from edgespec.cli.session import Chat, SavedChat, open_session, require_chat_template, show_beginning
from edgespec.cli.slash import COMMANDS, run_slash
from edgespec.cli.stdin import ReadLine, file_text, is_interactive, line_reader, read_message
from edgespec.cli.terminal import complain, note, reply, verbosity
from edgespec.config.sources import Settings
from edgespec.errors import EdgespecError
from edgespec.formats.manifest import MANIFEST
from edgespec.installation import has_engine, install_command
from edgespec.kernels.library import library_path
from edgespec.loading.catalogue import entries
from edgespec.loading.registry import models_folder, registered_folders
from edgespec.platform import disk_cache

FIRST = "smollm2-135m"
CHOSEN_HERE = "chosen, as no model was named"  # where /show says the model comes from
_KEY = disk_cache.key_of("first model", FIRST)


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
    return converse(given, model_name, config_file, session_path, first_file)


def converse(
    given: Mapping[str, Any],
    model_name: str | None,
    config_file: Path | None,
    session_path: Path | None = None,
    first_file: str | None = None,
) -> int:
    """The whole chat; the exit code."""
    first = None if first_file is None else file_text(first_file, "--file")
    settings = settings_with_model(given, model_name, config_file)
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
        chat.session.model.close()


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
                message, is_command = read_message(read_line)
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


# -- which model, where none was named: the one got last; else a small real one, asked for once and in a terminal only;
# else the demo


def settings_with_model(given: Mapping[str, Any], model_name: str | None, config_file: Path | None) -> Settings:
    """As `resolve_settings`, with a model chosen where none is named."""
    settings = resolve_settings(given, model_name, config_file)
    if (name := first_model(settings)) is not None:
        settings = settings.above({"model": name}, CHOSEN_HERE)
    return settings


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
    click.echo(click.wrap_text(offer, shutil.get_terminal_size().columns), err=True)
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

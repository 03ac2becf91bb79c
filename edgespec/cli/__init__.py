"""The command line: parses, calls the runtime, prints. One module per command."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.errors import EdgespecError, ModelFileError
from edgespec.installation import quoted
from edgespec.platform.files import expanded

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from edgespec.formats.manifest import ModelFile

# A model's text must not move the cursor, change the window title or answer for the user.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_SHOWS_ALL = "edgespec.help-all"


class FilePath(click.Path):
    """A path; `~` is the home folder behind `--option=` too, where shells leave it as it is."""

    def __init__(self, *, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(expanded(value), param, ctx)


def help_all_option(help: str, **attributes: Any) -> Callable[[Any], Any]:
    """`--help-all`: what --help leaves out, too; `shows_all` is true of its context then."""

    def print_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_SHOWS_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    flags: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    return click.option("--help-all", callback=print_all, help=help, **flags, **attributes)


def shows_all(ctx: click.Context) -> bool:
    return bool(ctx.meta.get(_SHOWS_ALL))


def has_escapes() -> bool:
    """Whether escape codes may be written to a terminal; click drops them elsewhere."""
    return os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def printable(text: str) -> str:
    """A model's text without control characters that would move the cursor or change the terminal."""
    return text.translate(_CONTROLS)


def as_typed(error: EdgespecError) -> str:
    """Its message; where that is about a setting, settings have the names of options, not those of Python's fields."""
    from edgespec.config.options import BY_KEY

    text = error.on_the_command_line
    if "_" not in (name := text.partition(" ")[0]) or name not in BY_KEY:
        return text
    return re.sub(r"\b[a-z]+(_[a-z]+)+\b", lambda found: BY_KEY[found[0]].key if found[0] in BY_KEY else found[0], text)


# -- models as a shell has them: what it offers when Tab is pressed, and the commands that run one, to be copied


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A file, or a model by its name, here or to pull. The file comes first: bash forgets what stands before it."""
    from click.shell_completion import CompletionItem  # only where Tab is pressed

    from edgespec.loading.catalogue import entries
    from edgespec.loading.registry import registered_folders

    names = sorted({*registered_folders(), *(entries() if incomplete else ())})
    known = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return [CompletionItem(incomplete, type="file"), *known]


def run_command(name: str, target: ModelFile | None) -> str:
    """`name`: how the user names the model of the file `target`; without a file it is taken for one that chats."""
    from edgespec.loading.opening import has_chat_template

    try:
        chats = target is None or has_chat_template(target)
    except ModelFileError:  # it only gives embeddings
        chats = True
    return f"edgespec chat {quoted(name)}" if chats else continue_command(name)


def continue_command(name: str) -> str:
    """The command that continues a text without a chat template."""
    return f"edgespec run {quoted(name)} --no-chat-template -p {quoted('Once upon a time')}"

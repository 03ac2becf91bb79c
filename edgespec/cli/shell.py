"""Models as a shell has them: what it offers when Tab is pressed, and the commands that run one, to be copied."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from edgespec.errors import ModelFileError
from edgespec.installation import quoted

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from edgespec.formats.manifest import ModelFile


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A path; click itself offers none where a hub id may stand too."""
    from click.shell_completion import CompletionItem  # only where Tab is pressed

    return [CompletionItem(incomplete, type="file")]


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A model on this machine, or a file. The file comes first: bash forgets what stands before it."""
    return files(ctx, param, incomplete) + names_here(ctx, param, incomplete)


def names_here(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A model on this machine by its name."""
    from edgespec.loading.registry import registered_folders

    return _beginning_with(incomplete, registered_folders())


def names_known(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A model on this machine, or one that can be pulled."""
    from edgespec.loading.catalogue import entries
    from edgespec.loading.registry import registered_folders

    return _beginning_with(incomplete, {**registered_folders(), **entries()})


def _beginning_with(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def run_command(name: str, target: ModelFile | None) -> str:
    """`name`: how the user names the model of the file `target`; without a file it is taken for one that chats."""
    from edgespec.loading.opening import has_chat_template

    try:
        chats = target is None or has_chat_template(target)
    except ModelFileError:  # it only gives embeddings
        chats = True
    return f"edgespec chat {_quoted(name)}" if chats else continue_command(name)


def continue_command(name: str) -> str:
    """The command that continues a text without a chat template."""
    return f"edgespec run {_quoted(name)} --no-chat-template -p {quoted('Once upon a time')}"


def _quoted(name: str) -> str:
    """As a shell takes it; letters of any language need no quotation marks, which `shlex` puts around them."""
    return name if re.fullmatch(r"[\w./:-]+", name) else quoted(name)

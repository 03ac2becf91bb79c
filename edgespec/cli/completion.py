"""What a shell offers for MODEL and NAME when Tab is pressed: names of models, and files where these are taken too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


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

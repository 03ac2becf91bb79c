"""The command line: parses, calls the runtime, prints. One module per command."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click

from edgespec.errors import EdgespecError
from edgespec.platform.files import expanded

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


def wrapped(text: str, stream: TextIO | None = None) -> str:
    """Lines for stderr or another stream, broken at words where it is a terminal. Programs get them whole."""
    if not (stream or sys.stderr).isatty():
        return text
    columns = shutil.get_terminal_size().columns
    fill = partial(textwrap.fill, width=columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(fill, text.split("\n")))


def as_typed(error: EdgespecError) -> str:
    """Its message; where that is about a setting, settings have the names of options, not those of Python's fields."""
    from edgespec.config.options import BY_KEY

    text = error.on_the_command_line
    if "_" not in (name := text.partition(" ")[0]) or name not in BY_KEY:
        return text
    return re.sub(r"\b[a-z]+(_[a-z]+)+\b", lambda found: BY_KEY[found[0]].key if found[0] in BY_KEY else found[0], text)


def say(text: str) -> None:
    """A line of the result, broken at words in a terminal."""
    click.echo(wrapped(text, sys.stdout))


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows of a table as lines; the columns `right` end, and the others begin, below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if index in right else str.ljust for index in range(len(widths))]
    return ["  ".join(side(cell, w) for side, cell, w in zip(sides, row, widths, strict=True)).rstrip() for row in rows]

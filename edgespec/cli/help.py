"""`--help` of the commands that take settings: options by group, the common ones first, all of them with --help-all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from edgespec.config.habits import CALLED, INSTEAD
from edgespec.config.table import Setting

OWN, OTHER = "Options", "Other"  # the sections of what one command alone takes, and of what all take
_SECTIONS = (OWN, "Model", "Hardware", "Speculation", "Sampling", "Answer", "Output", OTHER)
_TITLES = {"Sampling": "Sampling (a model may come with defaults of its own)"}
_SHOWS_ALL = "edgespec.help-all"
_MOST_CHOICES = 40  # characters of choices that stand beside a flag; longer lists only with --help-all
_WIDEST_FLAGS = 28  # columns; a longer flag has its text on the next line


def show(value: Any) -> str:
    """A setting's value as a user writes it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


class GroupedOption(click.Option):
    """An option with its section of --help; `is_basic`: listed without --help-all too."""

    def __init__(
        self, declarations: Sequence[str], *, group: str = OTHER, is_basic: bool = True, **attributes: Any
    ) -> None:
        super().__init__(declarations, **attributes)
        self.group, self.is_basic = group, is_basic


class SettingOption(GroupedOption):
    def __init__(self, declarations: Sequence[str], *, setting: Setting, **attributes: Any) -> None:
        super().__init__(declarations, group=setting.group, is_basic=setting.is_basic, **attributes)
        self.setting = setting

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        flags = [
            flag for flag in self.opts if shows_all or flag == f"--{self.setting.key}" or not flag.startswith("--")
        ]
        if self.setting.kind == "switch":
            flags = [f"--[no-]{self.setting.key}"]
        value = "" if self.setting.kind == "switch" else f" {_value(self.setting)}"
        choices = "|".join(self.setting.choices)
        listed = f": {', '.join(self.setting.choices)}" if shows_all and len(choices) > _MOST_CHOICES else ""
        text, bracket, without = self.setting.help.partition(" [")
        return f"{', '.join(flags)}{value}", f"{text}{listed}{bracket}{without}{_default(self.setting)}"


def _value(setting: Setting) -> str:
    choices = "|".join(setting.choices)
    if choices:
        return choices if len(choices) <= _MOST_CHOICES else "NAME"
    kinds = {"integer": "N", "number": "X", "path": "FILE"}
    return setting.metavar or kinds.get(setting.kind, "TEXT")


def _default(setting: Setting) -> str:
    is_said = setting.help.endswith("]") or setting.default in (None, (), "")
    return "" if is_said else f" [{show(setting.default)}]"


class SettingsCommand(click.Command):
    """A command whose options are listed by group."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, but a long name behind one dash is no short option with a value: -temp is not -t emp."""
        flags = {flag for param in self.get_params(ctx) for flag in (*param.opts, *param.secondary_opts)}
        for word in args[: args.index("--") if "--" in args else None]:
            is_name = f"-{word}" in flags or not {word[1:]}.isdisjoint((*CALLED, *INSTEAD))
            if len(word) > 2 and word.startswith("-") and word not in flags and is_name:
                raise click.NoSuchOption(word, ctx=ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in _SECTIONS}
        for param in self.get_params(ctx):
            if (
                not isinstance(param, click.Option)
                or param.hidden
                or not (shows_all or getattr(param, "is_basic", True))
            ):
                continue
            record = param.get_help_record(ctx)
            if record is not None:
                sections[OTHER if "--help" in param.opts else getattr(param, "group", OWN)].append(record)
        rows = [row for section in sections.values() for row in section]
        width = max(len(flags) for flags, _ in rows if len(flags) <= _WIDEST_FLAGS)
        formatter.write_paragraph()
        for name, section in sections.items():
            if section:  # without the empty line that click puts before each: all of it should fit on a screen
                formatter.write(f"{_TITLES.get(name, name)}:\n")
                with formatter.indentation():
                    formatter.write_dl([(flags.ljust(width), text) for flags, text in section], col_max=width)


def help_all_option() -> Callable[[Any], Any]:
    """`--help-all`: every option, with all its spellings and choices."""

    def print_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_SHOWS_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.option(
        "--help-all",
        cls=GroupedOption,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=print_all,
        help="All options, every spelling",
    )

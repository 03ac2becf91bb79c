"""click options made from the settings table, their `--help` by group, and the typed options of what was given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from edgespec.cli import FilePath, complete_model, help_all_option, shows_all
from edgespec.cli.terminal import set_verbosity
from edgespec.config.options import SETTINGS
from edgespec.config.sources import Settings, resolve
from edgespec.config.table import CALLED, INSTEAD, Part, Setting
from edgespec.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])
_MODEL = click.argument("model_name", metavar="[MODEL]", required=False, shell_complete=complete_model)


def settings_options(
    *parts: Part, leave_out: Collection[str] = (), hidden: Collection[str] = (), model: Callable[[Any], Any] = _MODEL
) -> Callable[[Function], Function]:
    """A decorator: MODEL, a flag for every setting of `parts`, and what every such command takes.

    `hidden`: settings that the command refuses with a reason, so that --help does not offer them. `model`: the argument
    for MODEL, of a command that takes several.
    """
    config: dict[str, Any] = {"type": FilePath(), "metavar": "FILE", "help": "Settings file, TOML"}
    verbosity: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": _set_verbosity, "group": "Output"}
    common = (
        help_all_option("All options, every spelling", cls=GroupedOption),
        click.option("--config", "config_file", cls=GroupedOption, **config),
        click.option("-q", "--quiet", cls=GroupedOption, help="Show the result and errors only", **verbosity),
        click.option(
            "-v", "--verbose", cls=GroupedOption, help="Show notes on what is measured and chosen", **verbosity
        ),
    )

    def decorate(function: Function) -> Function:
        chosen = [s for s in SETTINGS if s.part in parts and s.name not in leave_out]
        settings = [_option(setting, hidden=setting.name in hidden) for setting in reversed(chosen)]
        for option in (*common, *settings, model):
            function = option(function)
        return function

    return decorate


def _set_verbosity(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        set_verbosity("verbose" if param.name == "verbose" else "quiet")


def _option(setting: Setting, *, hidden: bool) -> Callable[[Function], Function]:
    def read(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        return setting.read(value, f"--{setting.key}") if isinstance(value, str) else value

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if setting.kind in ("path", "contents"):
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(choice) for choice in setting.choices if choice.startswith(incomplete)]

    flags = list(setting.flags)
    kwargs: dict[str, Any] = {"default": None, "multiple": setting.kind == "texts", "hidden": hidden}
    if setting.kind == "switch":
        flags[-1] += f"/--no-{setting.key}"
    else:
        kwargs |= {"type": str, "callback": read, "shell_complete": complete}
    return click.option(setting.name, *flags, cls=GroupedOption, group=setting.group, setting=setting, **kwargs)


def resolve_settings(given: Mapping[str, Any], model_name: str | None, config_file: Path | None) -> Settings:
    """What was given on the command line, over environment and config file. Raises ConfigError."""
    flags = dict(given)
    if model_name is not None:
        if flags.get("model") not in (None, model_name):
            raise ConfigError(f"two models are given, {model_name!r} and --model {flags['model']!r}: keep one")
        flags["model"] = model_name
    return resolve(flags, config_file=config_file)


# -- --help: options by group, the common ones first; all of them with --help-all


OWN, OTHER = "Options", "Other"  # the sections of what one command alone takes, and of what all take
_SECTIONS = (OWN, "Model", "Hardware", "Speculation", "Sampling", "Answer", "Output", OTHER)
_TITLES = {"Sampling": "Sampling (a model may come with defaults of its own)"}
_PLACEHOLDERS = {"integer": "N", "number": "X", "path": "FILE"}
_WIDEST_FLAGS = 28  # columns; a longer flag has its text on the next line


def show(value: Any) -> str:
    """A setting's value as a user writes it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


class GroupedOption(click.Option):
    """An option with its section of --help; `setting`: what it sets."""

    def __init__(
        self, declarations: Sequence[str], *, group: str = OTHER, setting: Setting | None = None, **attributes: Any
    ) -> None:
        super().__init__(declarations, **attributes)
        self.group, self.setting = group, setting

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        setting, is_whole = self.setting, shows_all(ctx)
        if self.hidden or setting is None:
            return super().get_help_record(ctx)
        if not (is_whole or setting.is_basic):
            return None
        flags = [flag for flag in self.opts if is_whole or flag == f"--{setting.key}" or not flag.startswith("--")]
        value = setting.metavar or "|".join(setting.choices) or _PLACEHOLDERS.get(setting.kind, "TEXT")
        spelled = f"--[no-]{setting.key}" if setting.kind == "switch" else f"{', '.join(flags)} {value}"
        listed = f": {', '.join(setting.choices)}" if is_whole and setting.metavar and setting.choices else ""
        text, bracket, without = setting.help.partition(" [")
        is_said = bracket or setting.default in (None, (), "")
        return spelled, f"{text}{listed}{bracket}{without}" + ("" if is_said else f" [{show(setting.default)}]")


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
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in _SECTIONS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:  # neither hidden nor for --help-all
                sections[OTHER if "--help" in param.opts else getattr(param, "group", OWN)].append(record)
        formatter.write_paragraph()
        for name, section in sections.items():
            if section:  # without the empty line that click puts before each: all of it should fit on a screen
                formatter.write(f"{_TITLES.get(name, name)}:\n")
                with formatter.indentation():
                    formatter.write_dl(section, col_max=_WIDEST_FLAGS)

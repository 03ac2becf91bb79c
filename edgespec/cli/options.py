"""click options made from the settings table, and the typed options made from what was given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from edgespec.cli import FilePath
from edgespec.cli.help import GroupedOption, SettingOption, help_all_option
from edgespec.cli.shell import models
from edgespec.cli.terminal import set_verbosity
from edgespec.config.options import SETTINGS, Sampling
from edgespec.config.sources import Settings, resolve
from edgespec.config.table import Part, Setting
from edgespec.errors import ConfigError


class _Value(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """What a setting may be, read as in the environment."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self.name = setting, setting.kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._setting.parse(value, f"--{self._setting.key}") if isinstance(value, str) else value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self._setting.kind in ("path", "contents"):
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(choice) for choice in self._setting.choices if choice.startswith(incomplete)]


Function = TypeVar("Function", bound=Callable[..., Any])


def settings_options(
    *parts: Part, leave_out: Collection[str] = (), hidden: Collection[str] = (), takes_models: bool = False
) -> Callable[[Function], Function]:
    """A decorator: MODEL, a flag for every setting of `parts`, and what every such command takes.

    `hidden`: settings that the command refuses with a reason, so that --help does not offer them. `takes_models`: the
    command takes any number of models, as `model_names`.
    """

    def decorate(function: Function) -> Function:
        chosen = [s for s in SETTINGS if s.part in parts and s.name not in leave_out]
        metavar = "[MODEL]..." if takes_models else "[MODEL]"
        model = click.argument(
            "model_names" if takes_models else "model_name",
            metavar=metavar,
            required=False,
            nargs=-1 if takes_models else 1,
            shell_complete=models,
        )
        settings = [_option(setting, hidden=setting.name in hidden) for setting in reversed(chosen)]
        for option in (help_all_option(), *reversed(_common_options()), *settings, model):
            function = option(function)
        return function

    return decorate


def _common_options() -> list[Callable[[Function], Function]]:
    config: dict[str, Any] = {"type": FilePath(), "metavar": "FILE", "help": "Settings file, TOML"}
    return [
        verbosity_option("-v", "--verbose", help="Show notes on what is measured and chosen"),
        verbosity_option("-q", "--quiet", help="Show the result and errors only"),
        click.option("--config", "config_file", cls=GroupedOption, **config),
    ]


def verbosity_option(*flags: str, help: str) -> Callable[[Function], Function]:
    """-v or -q: how much is said beside the result, for as long as this command runs."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            set_verbosity(ctx, "verbose" if param.name == "verbose" else "quiet")

    return click.option(
        *flags, cls=GroupedOption, group="Output", is_flag=True, expose_value=False, callback=remember, help=help
    )


def _option(setting: Setting, *, hidden: bool) -> Callable[[Function], Function]:
    flags = list(setting.flags)
    kwargs: dict[str, Any] = {"default": None, "multiple": setting.kind == "texts", "hidden": hidden}
    if setting.kind == "switch":
        flags[-1] += f"/--no-{setting.key}"
    else:
        kwargs["type"] = str if setting.kind == "texts" else _Value(setting)
    return click.option(setting.name, *flags, cls=SettingOption, setting=setting, **kwargs)


def resolve_settings(
    given: Mapping[str, Any],
    model_name: str | None,
    config_file: Path | None,
    *,
    leave_out: Collection[str] = (),
) -> Settings:
    """What was given on the command line, over environment and config file. Raises ConfigError.

    `leave_out`: settings that do not hold for this model, wherever they were given.
    """
    flags = dict(given)
    if model_name is not None:
        if flags.get("model") not in (None, model_name):
            raise ConfigError(f"two models are given, {model_name!r} and --model {flags['model']!r}: keep one")
        flags["model"] = model_name
    return resolve(flags, config_file=config_file).without(leave_out)


def sampling_of(settings: Settings) -> Sampling:
    """The sampling settings, with a fresh seed where none or -1 is given."""
    return Sampling(**settings.part("sampling")).seeded()

"""click options made from the settings table, and the typed options made from what was given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgespec.cli import FilePath
from edgespec.cli.help import GroupedOption, SettingOption, help_all_option
from edgespec.cli.shell import models
from edgespec.cli.terminal import set_verbosity
from edgespec.config.habits import did_you_mean
from edgespec.config.options import SETTINGS
from edgespec.config.sources import Settings, resolve
from edgespec.config.table import Kind, Part, Setting, contents
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from edgespec.sampling import Sampling


class _Length(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """A whole number, or one of the `words`, of which auto is one."""

    name = "length"

    def __init__(self, words: str) -> None:
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "auto" or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor {self._words}", param, ctx)


class _Context(_Length):
    """A context in tokens, auto for what fits, or max for the model's own, which is 0."""

    name = "context"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return 0 if value == "max" else super().convert(value, param, ctx)


class _Choice(click.Choice):  # type: ignore[type-arg]  # generic in newer releases of click only
    """One of a few names; another one names the nearest."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"{value!r} is not known; allowed: {', '.join(self.choices)}{did_you_mean(str(value), self.choices)}"


class _Contents(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """What a file holds, or a JSON object itself."""

    name = "contents"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if param is None:
            return contents(value, "the command line", is_json=False)
        return contents(value, f"--{param.opts[-1].lstrip('-')}", is_json=param.name == "json_schema")


_TYPES: dict[Kind, Any] = {
    "text": str,
    "path": FilePath(),
    "integer": int,
    "number": float,
    "switch": bool,
    "texts": str,
    "length": _Length("auto"),
    "context": _Context("auto or max"),
    "size": str,
    "contents": _Contents(),
}
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
        kwargs["type"] = _Choice(setting.choices) if setting.choices else _TYPES[setting.kind]
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
    from edgespec.sampling import Sampling  # not at the top: commands that load nothing do without

    return Sampling(**settings.part("sampling")).seeded()

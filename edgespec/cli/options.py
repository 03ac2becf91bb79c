"""click options made from the settings table, and the typed options made from what was given."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from edgespec.config import GenerateOptions, LoadOptions, SessionOptions
from edgespec.errors import ConfigError
from edgespec.formats.files import is_file
from edgespec.sampling import Sampling
from edgespec.settings import SETTINGS, Kind, Part, Setting, Settings, resolve
from edgespec.tuning.profiles import with_profile

_OWNERS = {"load": LoadOptions, "sampling": Sampling, "generate": GenerateOptions, "session": SessionOptions}


class _Length(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """A draft length: a whole number, or auto."""

    name = "length"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "auto" or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor auto", param, ctx)


_TYPES: dict[Kind, Any] = {
    "text": str,
    "path": click.Path(path_type=Path),
    "integer": int,
    "number": float,
    "switch": bool,
    "texts": str,
    "length": _Length(),
}
Function = TypeVar("Function", bound=Callable[..., Any])


def settings_options(*parts: Part, leave_out: Collection[str] = ()) -> Callable[[Function], Function]:
    """A decorator: MODEL, --config and a flag for every setting of `parts`."""

    def decorate(function: Function) -> Function:
        chosen = [s for s in SETTINGS if s.part in parts and s.name not in leave_out]
        options = [_option(setting) for setting in chosen]
        config = click.option(
            "--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="TOML file with settings."
        )
        profile = click.option("--no-profile", is_flag=True, help="Ignore what edgespec tune found for this model.")
        model = click.argument("model_name", metavar="[MODEL]", required=False)
        for option in (profile, config, *reversed(options), model):
            function = option(function)
        return function

    return decorate


def _option(setting: Setting) -> Callable[[Function], Function]:
    flags = list(setting.flags)
    kwargs: dict[str, Any] = {"default": None, "help": _help(setting), "multiple": setting.kind == "texts"}
    if setting.kind == "switch":
        flags[-1] += f"/--no-{setting.key}"
    else:
        kwargs["type"] = click.Choice(setting.choices) if setting.choices else _TYPES[setting.kind]
        kwargs["metavar"] = setting.metavar or None
    return click.option(setting.name, *flags, **kwargs)


def _help(setting: Setting) -> str:
    default = default_of(setting)
    return setting.help if default in (None, (), "") else f"{setting.help}  [default: {show(default)}]"


def default_of(setting: Setting) -> Any:
    """What a setting is when nobody gives it; None when model and machine decide."""
    if setting.name == "seed":
        return None
    (field,) = (field for field in dataclasses.fields(_OWNERS[setting.part]) if field.name == setting.name)
    return field.default


def show(value: Any) -> str:
    """A setting's value as a user writes it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def resolve_settings(
    given: Mapping[str, Any], model_name: str | None, config_file: Path | None, *, speculates: bool = False
) -> Settings:
    """What was given on the command line, over environment, config file and the model's profile. Raises ConfigError.

    `speculates`: the command is about speculation, so a profile for which plain decoding is best leaves that open.
    """
    flags = dict(given)
    ignores_profile = flags.pop("no_profile", False)
    if model_name is not None:
        if flags.get("model") not in (None, model_name):
            raise ConfigError(f"two models are given, {model_name!r} and --model {flags['model']!r}: keep one")
        flags["model"] = model_name
    if config_file is not None and not is_file(config_file):
        raise ConfigError(f"config file {config_file} does not exist")
    settings = resolve(flags, config_file=config_file)
    return settings if ignores_profile else with_profile(settings, leaves_plain=speculates)


def sampling_of(settings: Settings) -> Sampling:
    """The sampling settings; a random seed of 32 bits where none is given, so that it fits any JSON reader."""
    values = settings.part("sampling")
    values.setdefault("seed", secrets.randbits(32))
    return Sampling(**values)

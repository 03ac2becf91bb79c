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
from edgespec.sampling import Sampling
from edgespec.settings import SETTINGS, Kind, Part, Setting, Settings, resolve

_OWNERS = {"load": LoadOptions, "sampling": Sampling, "generate": GenerateOptions, "session": SessionOptions}
_TYPES: dict[Kind, Any] = {
    "text": str,
    "path": click.Path(path_type=Path),
    "integer": int,
    "number": float,
    "switch": bool,
    "texts": str,
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
        for option in (config, *reversed(options), click.argument("model_name", metavar="[MODEL]", required=False)):
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


def resolve_settings(given: Mapping[str, Any], model_name: str | None, config_file: Path | None) -> Settings:
    """What was given on the command line, over environment and config file. Raises ConfigError."""
    flags = dict(given)
    if model_name is not None:
        if flags.get("model") not in (None, model_name):
            raise ConfigError(f"two models are given, {model_name!r} and --model {flags['model']!r}: keep one")
        flags["model"] = model_name
    if config_file is not None and not config_file.is_file():
        raise ConfigError(f"config file {config_file} does not exist")
    return resolve(flags, config_file=config_file)


def sampling_of(settings: Settings) -> Sampling:
    """The sampling settings; a random seed of 32 bits where none is given, so that it fits any JSON reader."""
    values = settings.part("sampling")
    values.setdefault("seed", secrets.randbits(32))
    return Sampling(**values)

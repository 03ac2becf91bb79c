"""Where an option's value comes from: flag > EDGESPEC_* environment > TOML config file > default."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.config.options import BY_KEY, SETTINGS
from edgespec.config.table import Part, Setting, did_you_mean
from edgespec.errors import ConfigError
from edgespec.platform.files import exists, expanded, is_file, read_text, user_folder

ENVIRONMENT_PREFIX = "EDGESPEC_"
# Variables that are no settings: where things lie and a real model for the tests that want one.
PLACES = ("CONFIG", "HOME", "KERNELS", "MODELS", "TEST_MODEL")
_NAMED = ("model", "draft", "medium")  # a path, or the name that a model goes by here


@dataclass(frozen=True, slots=True)
class Settings:
    """The values that were given anywhere, and for each where: `values` and `sources` by setting name."""

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def part(self, part: Part) -> dict[str, Any]:
        """Keyword arguments for the dataclass of one part; what is absent keeps that class's default."""
        return {s.name: self.values[s.name] for s in SETTINGS if s.part == part and s.name in self.values}

    def below(self, defaults: Mapping[str, Any], source: str) -> Settings:
        """These settings with `defaults` (a model's recommended values) filled in underneath."""
        known = {find(key, source).name: value for key, value in defaults.items()}
        return Settings({**known, **self.values}, {**dict.fromkeys(known, source), **self.sources})

    def above(self, values: Mapping[str, Any], source: str) -> Settings:
        """These settings with other `values` for some of them."""
        return Settings({**self.values, **values}, {**self.sources, **dict.fromkeys(values, source)})

    def without(self, names: Iterable[str]) -> Settings:
        """These settings as if nobody had given those of `names`."""
        left_out = set(names)
        values = {name: value for name, value in self.values.items() if name not in left_out}
        return Settings(values, {name: source for name, source in self.sources.items() if name in values})


def find(key: str, source: str) -> Setting:
    """The setting that `key` names, hyphens or underscores alike. Raises ConfigError with the nearest name."""
    setting = BY_KEY.get(key.replace("-", "_"))
    if setting is None:
        hint = did_you_mean(key, [spelling.replace("_", "-") for spelling in BY_KEY])
        raise ConfigError(
            f"{source}: unknown setting {key!r}{hint or '; known: ' + ', '.join(s.key for s in SETTINGS)}"
        )
    return setting


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, config_file: Path | None = None
) -> Settings:
    """Merge `flags` (by setting name; None, False for absent texts: not given), environment and config file.

    `config_file` None: the file that EDGESPEC_CONFIG names (empty: none), else the user's own if there is one.
    Raises ConfigError for an unknown key, a wrong value, or a file that cannot be read; SamplingError for a wrong value
    of a setting of sampling.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    path = config_file or _config_file(environ)
    layers = [_from_file(path)] if path else []
    layers += [_from_environment(environ), [(name, value, "the command line") for name, value in flags.items()]]
    for layer in layers:
        for name, value, source in layer:
            if value is not None and value != ():
                values[name], sources[name] = value, source
    for name, text in values.items():
        try:
            ("" if name in _NAMED else "".join(text) if isinstance(text, tuple) else str(text)).encode()
        except UnicodeEncodeError as exc:  # bytes that Python could not decode; paths may have such names
            where = f"--{find(name, '').key}, from {sources[name]},"
            raise ConfigError(f"{where} is not UTF-8 text: invalid byte behind {exc.start} characters") from exc
    return Settings(values, sources)


def _config_file(environ: Mapping[str, str]) -> Path | None:
    chosen = environ.get(ENVIRONMENT_PREFIX + "CONFIG")
    if chosen is not None:
        return expanded(chosen) if chosen else None
    own = user_folder("config", environ) / "config.toml"
    return own if is_file(own) else None


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    found = []
    for variable, text in sorted(environ.items()):
        key = variable.removeprefix(ENVIRONMENT_PREFIX)
        if key == variable or key in PLACES:
            continue
        setting = BY_KEY.get(key.lower())
        if setting is None:
            near = did_you_mean(key, map(str.upper, BY_KEY)).replace("mean '", f"mean '{ENVIRONMENT_PREFIX}")
            raise ConfigError(f"unknown environment variable {variable}{near or '; unset it'}")
        if not text and setting.kind not in ("text", "texts", "contents"):
            continue  # as good as unset
        found.append((setting.name, setting.read(text, variable), variable))
    return found


def _from_file(path: Path) -> list[tuple[str, Any, str]]:
    try:
        table = tomllib.loads(read_text(path))
    except OSError as exc:
        raise ConfigError(f"config file {path} cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:  # ValueError: TOML, UTF-8, an integer without end
        raise ConfigError(f"config file {path} is not TOML: {exc}") from exc
    seen: dict[str, str] = {}
    found = []
    for key, value in table.items():
        setting = find(key, str(path))
        if setting.name in seen:
            raise ConfigError(f"{path}: {key!r} and {seen[setting.name]!r} are the same setting; keep one")
        seen[setting.name] = key
        found.append((setting.name, setting.read(_placed(setting, value, path.parent), f"{path}: {key}"), str(path)))
    return found


def _placed(setting: Setting, value: Any, folder: Path) -> Any:
    """A path in a settings file is meant from `folder`, where that file lies; the name of a model stays one."""
    is_path = setting.kind in ("path", "contents") or setting.name == "model"
    if not is_path or not isinstance(value, str) or value.lstrip().startswith("{"):
        return value
    beside = folder / expanded(value)
    is_name = setting.name in _NAMED and beside.suffix not in (".gguf", ".onnx") and not exists(beside)
    return value if is_name else str(beside)

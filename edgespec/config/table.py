"""One option is one field of a dataclass: a `Section` puts its flags, help and check beside its type and default.

The command line's flags and --help, the environment's variables, the config file's keys, the chat's `/set` and the
checks of Python's keywords are all read from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from edgespec.config.habits import did_you_mean
from edgespec.config.values import Check, as_path, as_switch, as_text, one_of
from edgespec.errors import ConfigError
from edgespec.platform.files import expanded, read_text

Part = Literal["load", "sampling", "generate", "session", "serve"]
Group = Literal["Model", "Speculation", "Sampling", "Answer", "Output", "Hardware", "Options"]
Kind = Literal["text", "path", "integer", "number", "switch", "texts", "word", "contents"]
_KINDS: dict[Any, Kind] = {bool: "switch", int: "integer", float: "number", str: "text", Path: "path"}
_CHECKS: dict[Kind, Check] = {"switch": as_switch, "path": as_path, "text": as_text, "contents": as_text}
# What a config file may hold beside texts, and how messages call it.
_FORMS: dict[Kind, tuple[tuple[type, ...], str]] = {
    "integer": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "switch": ((bool,), "true or false"),
    "texts": ((list,), "a text or a list of texts"),
    "word": ((int,), "a whole number or a text"),
}
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Section:
    """A section of --help; called, it makes a field, listed there, of the dataclass for one part of the options."""

    part: Part
    title: Group

    def __call__(
        self,
        default: Value,
        flags: str = "",
        help: str = "",
        *,
        basic: bool = False,
        kind: Kind | None = None,
        check: Check | None = None,
    ) -> Value:
        """A field; without flags it is Python's alone.

        `flags`: all spellings on the command line, of which the first long one is the option's key; a word without a
        dash is the placeholder of its value. `help` says in brackets what holds if the option is not given, where that
        is no fixed default. `basic`: listed by --help, the others by --help-all only. `kind`, `check`: where the type
        does not say all.
        """
        words = flags.split()
        about = {
            "part": self.part,
            "group": self.title,
            "flags": tuple(word for word in words if word.startswith("-")),
            "metavar": "".join(word for word in words if not word.startswith("-")),
            "help": help,
            "is_basic": basic,
            "kind": kind,
            "check": check,
        }
        made: Value = field(default=default, metadata=about)
        return made


@dataclass(frozen=True, slots=True)
class Setting:
    """What a `Section` was told of the field `name`, and what its type says."""

    name: str
    default: Any
    kind: Kind
    choices: tuple[str, ...]
    part: Part
    group: Group
    flags: tuple[str, ...]
    metavar: str
    help: str
    is_basic: bool
    check: Check | None

    @property
    def key(self) -> str:
        """The name that messages, config file and `/set` use: the first long flag."""
        return next((flag[2:] for flag in self.flags if flag.startswith("--")), self.name)

    @property
    def keys(self) -> tuple[str, ...]:
        """All spellings, with underscores."""
        long_flags = [flag[2:] for flag in self.flags if flag.startswith("--")]
        return tuple(dict.fromkeys(key.replace("-", "_") for key in (*long_flags, self.name)))

    def read(self, value: Any, source: str) -> Any:
        """A text, or a value of a TOML file, as the right Python value. Raises ConfigError naming `source`."""
        if isinstance(value, str):
            return self._spelled(value, source)
        types, form = _FORMS.get(self.kind, ((), "a text"))
        is_listed = not isinstance(value, list) or all(isinstance(each, str) for each in value)
        if type(value) not in types or not is_listed:  # exactly: to isinstance, a bool is an int
            raise ConfigError(f"{source}: {value!r} has the wrong type; expected {form}")
        return tuple(value) if isinstance(value, list) else float(value) if self.kind == "number" else value

    def _spelled(self, text: str, source: str) -> Any:
        try:
            if self.kind in ("integer", "number"):
                return int(text) if self.kind == "integer" else float(text)
        except ValueError:
            raise ConfigError(f"{source}: {text!r} is not {_FORMS[self.kind][1]}") from None
        if self.kind == "word":
            return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text  # which the field's check looks at
        if self.kind == "switch":
            if text.lower() not in _SWITCHES:
                raise ConfigError(f"{source}: {text!r} is neither on nor off; allowed: {', '.join(_SWITCHES)}")
            return _SWITCHES[text.lower()]
        if self.kind == "texts":
            return (text,)
        if self.kind == "contents":
            return _contents(text, source, is_json=self.name == "json_schema")
        return self._chosen(text, source)

    def _chosen(self, text: str, source: str) -> str | Path:
        if self.choices and text not in self.choices:
            hint = did_you_mean(text, self.choices)
            raise ConfigError(f"{source}: {text!r} is not known; allowed: {', '.join(self.choices)}{hint}")
        return expanded(text) if self.kind == "path" else text


@cache
def settings_of(owner: Hashable) -> tuple[Setting, ...]:
    """The options of a dataclass."""
    types, found = get_type_hints(owner), []
    for each in fields(owner):  # type: ignore[arg-type]  # a class
        if about := dict(each.metadata):
            kind, choices = _kind_of(types[each.name])
            kind = about.pop("kind") or kind
            about["check"] = about["check"] or (one_of(*choices) if choices else _CHECKS.get(kind))
            found.append(Setting(each.name, each.default, kind, choices, **about))
    return tuple(found)


def _kind_of(annotation: Any) -> tuple[Kind, tuple[str, ...]]:
    """What kind of option a type makes, and the texts that are allowed, if they are few."""
    types = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    types = tuple(each for each in types if each is not type(None))
    words = tuple(word for each in types if get_origin(each) is Literal for word in get_args(each))
    if len(types) > 1 and int in types:
        return "word", ()
    return ("text", words) if words else (_KINDS.get(types[0], "texts"), ())


def check_values(options: object) -> None:
    """Have each field of a frozen dataclass pass its check. None passes where it is the default."""
    owner: Any = type(options)
    for setting in settings_of(owner):
        value = getattr(options, setting.name)
        if setting.check is not None and (value is not None or setting.default is not None):
            object.__setattr__(options, setting.name, setting.check(setting.name, value))


def _contents(text: str, source: str, *, is_json: bool) -> str:
    """What a file holds; `text` itself where it is a JSON object and so no name of a file. Raises ConfigError."""
    if text.lstrip().startswith("{"):
        return text
    try:
        found = read_text(expanded(text))
        if is_json:
            json.loads(found)
        return found
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{source}: the file {text!r} is not valid JSON: {exc}") from exc
    except RecursionError:
        return found  # nested too deeply, which is said where schemas are checked
    except (OSError, ValueError) as exc:  # ValueError: no UTF-8, a NUL in the name
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{source}: the file {text!r} cannot be read: {reason}") from exc

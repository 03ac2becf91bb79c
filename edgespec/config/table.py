"""One option is one field of a dataclass: a `Section` puts its flags, help and check beside its type and default.

The command line's flags and --help, the environment's variables, the config file's keys, the chat's `/set` and the
checks of Python's keywords are all read from there. Words that users of llama.cpp, Ollama, LM Studio and mlx-lm type by
habit are told what they are called here.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from edgespec.config.values import Check, as_path, as_switch, as_text
from edgespec.errors import ConfigError, shown
from edgespec.platform.files import expanded, given_text

Part = Literal["load", "sampling", "generate", "session", "serve"]
Group = Literal["Model", "Speculation", "Sampling", "Answer", "Output", "Hardware", "Options"]
Kind = Literal["text", "path", "integer", "number", "switch", "texts", "word", "contents"]
_KINDS: dict[Any, Kind] = {bool: "switch", int: "integer", float: "number", str: "text", Path: "path"}
_CHECKS: dict[Kind, Check] = {"switch": as_switch, "path": as_path, "text": as_text, "contents": as_text}
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Section:
    """A section of --help; called, it makes a field, listed there, of the dataclass for one part of the options."""

    part: Part
    title: Group
    is_basic: bool = False

    @property
    def basic(self) -> Section:
        """For fields that --help lists; those of others only --help-all does."""
        return replace(self, is_basic=True)

    def __call__(
        self, default: Value, flags: str = "", help: str = "", *, kind: Kind | None = None, check: Check | None = None
    ) -> Value:
        """A field; without flags it is Python's alone.

        `flags`: all spellings on the command line, of which the first long one is the option's key; a word without a
        dash is the placeholder of its value. `help` says in brackets what holds if the option is not given, where that
        is no fixed default. `kind`, `check`: where the type does not say all.
        """
        words = flags.split()
        spelled = tuple(word for word in words if word.startswith("-"))
        metavar = "".join(word for word in words if not word.startswith("-"))
        about = Setting(
            "", default, kind or "text", (), self.part, self.title, spelled, metavar, help, self.is_basic, check
        )
        made: Value = field(default=default, metadata={"setting": about, "kind": kind})
        return made


@dataclass(frozen=True, slots=True)
class Setting:
    """What a `Section` was told of the field `name`, and what its type says: `kind` and `choices`."""

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
        """A text, or a value of a TOML file, as the right Python value.

        Raises ConfigError, or SamplingError, naming `source`.
        """
        if isinstance(value, str):
            value = self._spelled(value, source)
        elif isinstance(value, list):
            value = tuple(value)
        return self.check(source, value) if self.check else value

    def _spelled(self, text: str, source: str) -> Any:
        """What `text` is for this kind of option; itself where it is nothing of the kind, which the check says."""
        if self.kind == "switch":
            return _SWITCHES.get(text.lower(), text)
        if self.kind == "texts":
            return (text,)
        if self.kind == "contents":
            return text if text.lstrip().startswith("{") else given_text(text, source)  # JSON, or the name of a file
        if self.kind == "path":
            return expanded(text)
        try:
            return float(text) if self.kind == "number" else int(text) if self.kind in ("integer", "word") else text
        except ValueError:
            return text


@cache
def settings_of(owner: Hashable) -> tuple[Setting, ...]:
    """The options of a dataclass."""
    types, found = get_type_hints(owner), []
    for each in fields(owner):  # type: ignore[arg-type]  # a class
        if (about := each.metadata.get("setting")) is not None:
            typed, choices = _kind_of(types[each.name])
            kind = each.metadata["kind"] or typed
            check = about.check or (one_of(*choices) if choices else _CHECKS.get(kind))
            found.append(replace(about, name=each.name, kind=kind, choices=choices, check=check))
    return tuple(found)


def one_of(*allowed: str) -> Check:
    def check(name: str, value: object) -> object:
        if not isinstance(value, str) or value not in allowed:
            hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
            raise ConfigError(f"{name} {shown(value)} is not known; allowed: {', '.join(allowed)}{hint}")
        return value

    return check


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


def _by_word(said: Mapping[str, str]) -> Mapping[str, str]:
    """By each word, what is said for the words that stand together."""
    return MappingProxyType({word: text for words, text in said.items() for word in words.split()})


# Commands and options, without dashes in front.
CALLED = _by_word(
    {
        "interactive repl": "chat",
        "complete completion ask": "run",
        "models": "ls",
        "get download install": "pull",
        "delete uninstall": "rm",
        "import": "add",
        "convert quantize quantise": "export",
        "info": "show",
        "n-predict predict num-predict max-new-tokens": "max-tokens",
        "ctx context context-length ctx-len num-ctx max-kv-size": "ctx-size",
        "gpu ngl n-gpu-layers num-gpu": "gpu-layers",
        "draft draft-n draft-min draft-num": "draft-length",
        "sys system-prompt": "system",
        "nothink no-think reasoning-budget": "no-thinking",
        "num-thread": "threads",
        "prompt-cache": "session",
        "reverse-prompt r": "stop",
    }
)
# What is done in another way here.
INSTEAD = _by_word(
    {
        "f file prompt-file": "-p - < FILE reads the prompt from a file",
        "cnv conversation i": "edgespec chat holds a conversation, run answers once",
        "hf hf-repo": "edgespec pull gets a model from the hub",
        "lora lora-scaled adapter": "adapters are not applied here: merge them into the model (llama.cpp's "
        "llama-export-lora)",
        "keepalive keep-alive": "a model stays loaded for as long as its command runs",
        "format": """--json-schema '{"type": "object"}' answers with any JSON object""",
        "cp create": "edgespec add FILE --name NAME; what a Modelfile sets are options, or lines of config.toml",
        "version": "edgespec --version",
        "ps stop": "nothing stays loaded when a command ends; edgespec ls lists models",
    }
)
_LEAST_ALIKE = 0.7  # two letters of four that are swapped (temp, tmep) are .75 alike


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' with the nearest of `known`, or nothing when none is near.

    A word of another program has its name here, or says how the same is done, before any that looks alike.
    """
    by_bare = {_bare(option): option for option in sorted(set(known))}
    habit = _bare(name)
    if CALLED.get(habit) in by_bare:
        return f"; did you mean '{by_bare[CALLED[habit]]}'?"
    if habit in INSTEAD and not {"chat", "ctx-size"}.isdisjoint(by_bare):
        return f"; {INSTEAD[habit]}"
    near = difflib.get_close_matches(habit, by_bare, n=1, cutoff=_LEAST_ALIKE)
    return f"; did you mean '{by_bare[near[0]]}'?" if near else ""


def _bare(name: str) -> str:
    return name.lstrip("-/").lower().replace("_", "-")

"""Checks of option values: each raises ConfigError that says what was given and what is allowed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from edgespec.config.names import MAX_COUNT, MAX_DRAFT_LENGTH
from edgespec.errors import ConfigError, EdgespecError, shown

Class = TypeVar("Class", bound=type[Any])


def refuses_unknown(error: type[EdgespecError]) -> Callable[[Class], Class]:
    """Dataclass decorator: an unknown keyword raises `error` with the list of known ones."""

    def decorate(cls: Class) -> Class:
        make = cls.__init__

        @wraps(make)
        def __init__(self: Any, *args: Any, **fields: Any) -> None:  # noqa: N807
            known = cls.__dataclass_fields__
            if unknown := sorted(fields.keys() - known.keys()):
                raise error(f"{cls.__name__} has no option {unknown[0]!r}; known: {', '.join(known)}")
            make(self, *args, **fields)

        cls.__init__ = __init__
        return cls

    return decorate


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} {shown(value)} is not known; allowed: {', '.join(allowed)}")


def whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, got {shown(value)}")
    return value


def at_least(name: str, given: object, least: int, hint: str = "") -> None:
    """`hint`: what to do instead, for who means a limit of other programs such as -1 for none."""
    if given is None:
        return
    value = whole(name, given)
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {shown(value)}{hint and f'; {hint}'}")
    if value > MAX_COUNT:
        raise ConfigError(f"{name} must be at most {MAX_COUNT}, got {shown(value)}")


def optional_text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name} must be text, got {shown(value)}")


def device_names(name: str, text: str | None) -> tuple[str, ...] | None:
    """Names of devices that have commas between them; "none": no device."""
    if text is None or text == "none":
        return None if text is None else ()
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise ConfigError(f"{name} {shown(text)} is not a device: edgespec doctor lists them, none means the processor")
    return names


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is an int or a float; bool does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def switches(options: object, *names: str) -> None:
    """Raise ConfigError if one of these fields is neither True nor False."""
    for name in names:
        if not isinstance(value := getattr(options, name), bool):
            raise ConfigError(f"{name} must be True or False, got {shown(value)}")


def as_texts(value: object) -> tuple[str, ...]:
    """Stop strings as a tuple; a single str is one stop string."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"stop must be a string or a list of strings, got {shown(value)}")
    if not all(texts):
        raise ConfigError("stop contains an empty string; each stop string needs at least one character")
    return tuple(texts)


def as_schema(value: object) -> str:
    """A JSON schema, given as a mapping or as JSON text, as JSON text. Raises ConfigError."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(dict(found), ensure_ascii=False, allow_nan=False) if isinstance(found, Mapping) else None
    except json.JSONDecodeError as exc:
        raise ConfigError(f"json_schema is not valid JSON: {exc}") from exc
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(f"json_schema contains what JSON cannot hold, or is nested too deeply: {exc}") from exc
    if text is None:
        raise ConfigError(f"json_schema must be a JSON object, as a dict or as text, got {shown(value)}")
    return text


def as_path(name: str, value: object) -> Path | None:
    """`value` as a Path; accepts str and os.PathLike."""
    if value is None or isinstance(value, Path):
        return value
    if not isinstance(value, str | os.PathLike) or "\0" in os.fsdecode(value):
        raise ConfigError(f"{name} must be a path, got {shown(value)}")
    return Path(os.fsdecode(value))


def check_draft_length(value: object) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (isinstance(value, str) and value == "auto") and not (is_whole and value in range(MAX_DRAFT_LENGTH + 1)):
        raise ConfigError(f"draft-length must be auto or 0..{MAX_DRAFT_LENGTH}, got {shown(value)}")


def check_context_length(value: object) -> None:
    if isinstance(value, str):
        if value != "auto":
            raise ConfigError(f"ctx-size must be a number, 0 for the model's own, or auto, got {shown(value)}")
        return
    if value is not None and whole("ctx-size", value) != 0:
        at_least("ctx-size", value, 16, "0 or max is the model's own, auto the largest that fits into memory")


def check_gpu_layers(value: object) -> None:
    if not (isinstance(value, str) and value == "auto"):
        at_least("gpu_layers", whole("gpu_layers", value), -1)


def check_draft_temperature(value: object) -> None:
    if not (is_number(value) and 0.05 <= value <= 20):
        raise ConfigError(f"draft-temp must be a number from 0.05 to 20, got {shown(value)}")


def check_share(value: object) -> None:
    if not (is_number(value) and 0 <= value <= 1):
        raise ConfigError(f"max-slowdown must be a fraction of time from 0 to 1, got {shown(value)}")

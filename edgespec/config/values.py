"""Values of options: their names and limits, and the checks that they pass.

A check takes an option's name and a value, and returns the value in the form in which it is kept. It raises ConfigError
that says what was given and what is allowed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar, get_args

from edgespec.errors import ConfigError, EdgespecError, shown

DrafterName = Literal[
    "auto",
    "none",
    "model",
    "tree",
    "hierarchical",
    "early-exit",
    "medusa",
    "eagle",
    "eagle3",
    "dflash",
    "mtp",
    "ngram",
    "suffix",
    "lookahead",
]
DraftLength = int | Literal["auto"]
GpuLayers = int | Literal["auto"]
ContextLength = int | Literal["auto"]
NumSequences = int | Literal["auto"]
RuleName = Literal["coupled", "rejection", "block", "typical"]
EngineName = Literal["auto", "llamacpp", "onnx"]
ProviderName = Literal["auto", "cpu", "cuda"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
PoolingName = Literal["mean", "cls", "last"]
ReasoningFormat = Literal["auto", "none", "deepseek"]  # llama-server's names
DRAFTERS: tuple[DrafterName, ...] = get_args(DrafterName)
LOSSY: frozenset[RuleName] = frozenset({"typical"})  # rules that change the target's output distribution
POOLINGS: tuple[PoolingName, ...] = get_args(PoolingName)
MAX_DRAFT_LENGTH = 64
MAX_COUNT = 2**31 - 1  # the engines' libraries count in int32
MAX_SERVERS = 16  # RPC servers; ggml's limit

Check = Callable[[str, Any], Any]
Class = TypeVar("Class", bound=type[Any])


def refuses_unknown(error: type[EdgespecError]) -> Callable[[Class], Class]:
    """Dataclass decorator: an unknown keyword raises `error` with the list of known ones."""

    def decorate(cls: Class) -> Class:
        make = cls.__init__

        @wraps(make)
        def __init__(self: Any, *args: Any, **given: Any) -> None:  # noqa: N807
            known = [each.name for each in fields(cls)]
            if unknown := sorted(given.keys() - set(known)):
                raise error(f"{cls.__name__} has no option {unknown[0]!r}; known: {', '.join(known)}")
            make(self, *args, **given)

        cls.__init__ = __init__
        return cls

    return decorate


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is an int or a float; bool does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {shown(value)}")
    return value


def as_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, got {shown(value)}")
    return value


def as_path(name: str, value: object) -> Path:
    """`value` as a Path; accepts str and os.PathLike."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str | os.PathLike) or not value or "\0" in os.fsdecode(value):
        raise ConfigError(f"{name} must be a path, got {shown(value)}")
    return Path(os.fsdecode(value))


def as_model(name: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not value:
        raise ConfigError(f"{name} must be a registry name or a path, got {shown(value)}")
    return os.fsdecode(value)


def as_texts(name: str, value: object) -> tuple[str, ...]:
    """Texts as a tuple; a single str is one of them."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{name} must be a string or a list of strings, got {shown(value)}")
    if not all(texts):
        raise ConfigError(f"{name} contains an empty string; each needs at least one character")
    return tuple(texts)


def as_schema(name: str, value: object) -> str:
    """A JSON schema, given as a mapping or as JSON text, as JSON text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(dict(found), ensure_ascii=False, allow_nan=False) if isinstance(found, Mapping) else None
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{name} is not valid JSON: {exc}") from exc
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{name} contains what JSON cannot hold, or is nested too deeply: {exc}") from exc
    if text is None:
        raise ConfigError(f"{name} must be a JSON object, as a dict or as text, got {shown(value)}")
    return text


def number(
    least: float,
    most: float = MAX_COUNT,
    *,
    is_whole: bool = True,
    words: tuple[str | int, ...] = (),
    hint: str = "",
    error: type[EdgespecError] = ConfigError,
) -> Check:
    """A number as Python's own, also one of numpy, or one of `words`. `hint`: what others may mean."""
    limits = f"from {least} to {most}" if most != MAX_COUNT else f"of at least {least}"
    said = " or ".join((*map(str, words), f"a {'whole ' if is_whole else ''}number {limits}"))

    def check(name: str, value: object) -> object:
        if isinstance(value, str | int) and not isinstance(value, bool) and value in words:
            return value
        found = value.item() if isinstance(value, Real) and hasattr(value, "item") else value
        if not is_number(found) or (is_whole and isinstance(found, float)) or not least <= found <= most:  # or NaN
            raise error(f"{name} must be {said}, got {shown(value)}{hint and f'; {hint}'}")
        return found

    return check


_context_length = number(16, words=("auto", "max", 0), hint="0 or max is the model's own, auto the largest that fits")


def as_context_length(name: str, value: object) -> object:
    found = _context_length(name, value)
    return 0 if found == "max" else found


def as_given(parse: Callable[[object], object]) -> Check:
    """Have a value pass `parse`, and keep it as it is."""

    def check(name: str, value: object) -> object:
        parse(value)
        return value

    return check


def device_names(text: object) -> tuple[str, ...]:
    """Names of devices that have commas between them; "none": no device. Raises ConfigError."""
    names = tuple(part.strip() for part in text.split(",")) if isinstance(text, str) else ()
    if not names or not all(names):
        raise ConfigError(f"{shown(text)} is not a device: edgespec doctor lists them, none means the processor")
    return () if text == "none" else names


TensorOverrides = tuple[tuple[str, str], ...]
"""(pattern of tensor names, name of the device that they lie on) pairs, of which the first that matches counts."""
CPU = "CPU"  # as llama.cpp names it


def tensor_overrides(text: object) -> TensorOverrides:
    """The pairs of `REGEX=DEVICE[,REGEX=DEVICE...]`. Raises ConfigError."""
    form = r"give REGEX=DEVICE[,REGEX=DEVICE...], for example exps=CPU or blk\.[0-7]\.ffn=CPU"
    parts = [part.partition("=") for part in str(text).split(",")]
    found = tuple((pattern.strip(), device.strip()) for pattern, _, device in parts)
    try:
        if isinstance(text, str) and all(pattern and device and re.compile(pattern) for pattern, device in found):
            return found
    except re.error as exc:
        form = f"no regular expression ({exc}); {form}"
    raise ConfigError(f"override-tensor {shown(text)} does not say which tensors go where: {form}")


_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}{rest}": 1024**power for power, letter in enumerate("kmgt", 1) for rest in ("", "ib")}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([a-z]*|%)")


def budget_bytes(given: object, free_bytes: int | None = None) -> int | None:
    """How much memory a loaded pair may take, in bytes; None for `auto`, which is all that is free.

    `given`: a share of `free_bytes` such as 80%, a size such as 6GiB, 6G, 1.5GB or 512MB, or whole bytes; G and GiB are
    1024^3 bytes, GB is 1000^3. None for a share where it is not known what is free, too. Raises ConfigError.
    """
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return given
    text = given.strip().lower() if isinstance(given, str) else ""
    if text == "auto":
        return None
    if found := _SIZE.fullmatch(text):
        count, unit = float(found[1]), found[2]
        if unit == "%" and 0 < count <= 100:
            return None if free_bytes is None else int(count / 100 * free_bytes)
        if count * _UNITS.get(unit, 0) >= 1:
            return int(count * _UNITS[unit])
    raise ConfigError(
        f"memory {shown(given)} is not a size; allowed: auto, a share of the free memory such as 80%, or a size such "
        "as 6GiB, 6G or 512MB"
    )


def as_size(num_bytes: float) -> str:
    """A size for people: GiB from 1 GiB on, MiB below, KiB or bytes where it would be no MiB."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / 2**30:.2f} GiB"
    if num_bytes >= 1 << 19:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB" if num_bytes >= 1 << 10 else f"{num_bytes:.0f} bytes"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows of a table as lines; the columns `right` end, and the others begin, below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if index in right else str.ljust for index in range(len(widths))]
    return ["  ".join(side(cell, w) for side, cell, w in zip(sides, row, widths, strict=True)).rstrip() for row in rows]


_ENDPOINT = re.compile(r"([A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?):([0-9]{1,6})")


def parse_endpoints(text: object) -> tuple[str, ...]:
    """`HOST:PORT[,HOST:PORT...]` as a tuple, in its order. Raises ConfigError."""
    parts = [_ENDPOINT.fullmatch(part.strip()) for part in str(text).split(",")]
    found = tuple(f"{part[1]}:{int(part[2])}" for part in parts if part and 1 <= int(part[2]) <= 65535)
    if not isinstance(text, str) or len(found) < len(parts) or len({*found}) < len(found) or len(found) > MAX_SERVERS:
        raise ConfigError(
            f"rpc {shown(text)} is no list of servers: give HOST:PORT[,HOST:PORT...], for example 192.168.1.20:50052, "
            f"at most {MAX_SERVERS}, each once; llama.cpp reaches them over IPv4 only"
        )
    return found

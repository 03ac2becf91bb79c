"""Reads the JSON of a request into a struct of its protocol: a wrong type or unknown name is one 400 that names it."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec

from edgespec.config.table import did_you_mean
from edgespec.errors import shown
from edgespec.sampling.constraint.numbers import scalars
from edgespec.server.http_errors import HttpError, bad_request

MAX_JSON_DEPTH = 64
MAX_CONTAINERS = 1 << 17  # lists and objects of a body: making them is what takes long
_EXPLAINED_BYTES = 1 << 20  # of a body that is no JSON: a longer one is not read twice
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_PATH = re.compile(r"(.*?)(?: - at `(?:key in )?\$([\w.\[\]]*)`)?", re.DOTALL)
# msgspec looks at a struct's types when it is first read; a thread that reads it meanwhile ends the process. It holds
# the interpreter's lock in any case, so nobody waits for longer.
_ONE_READER = threading.Lock()
Asked = Mapping[str, tuple[str, tuple[Any, ...]]]
"""Fields by name: why they have no effect, and the values that ask for nothing."""


class Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object of a request. A null counts as absent.

    `ignored`: fields that cannot change the answer; `noted`: those whose wish is not met, which a note says;
    `refused`: those that are an error unless they ask for nothing.
    """

    ignored: ClassVar[frozenset[str]] = frozenset()
    noted: ClassVar[Asked] = {}
    refused: ClassVar[Asked] = {}


Read = TypeVar("Read", bound=Fields)


def read(kind: type[Read], values: Mapping[str, Any], notes: list[str], where: str = "") -> Read:
    """`values` as a `kind`. Raises HttpError 400 that names the field, which begins with `where`.

    `notes` gets what the request asks for and does not get, although its answer has the text that was asked for.
    """
    given = {name: value for name, value in values.items() if value is not None and name not in kind.ignored}
    for name, (why, neutral) in kind.refused.items():
        value = given.pop(name, None)
        if value is not None and value not in neutral:
            raise unsupported(_joined(where, name), why)
    for name, (why, neutral) in kind.noted.items():
        value = given.pop(name, None)
        if value is not None and value not in neutral:
            notes.append(f"{_joined(where, name)}: {why}")
    try:
        with _ONE_READER:
            return msgspec.convert(given, kind)
    except msgspec.ValidationError as exc:
        raise _explained(kind, given, str(exc), where) from None


def unsupported(path: str, why: str) -> HttpError:
    """400 for a field that asks for what this server does not do."""
    return bad_request(f"{path} is not supported: {why}", path, "unsupported_parameter")


def wrong(path: str, rule: str, value: object) -> HttpError:
    """400 for a value that breaks `rule`."""
    return bad_request(f"{path} {rule}, got {_kind(value)}", path)


def one_of(given: Mapping[str, int | None]) -> int | None:
    """One setting that has several names; None without any. Raises HttpError where two of them differ."""
    named = {name: value for name, value in given.items() if value is not None}
    if len(set(named.values())) > 1:
        raise bad_request(f"{' and '.join(named)} are the same setting: give one", next(iter(named)))
    return next(iter(named.values()), None)


@contextmanager
def sent_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors within the block name fields as sent. `names`: by those of the request that its own became."""
    try:
        yield
    except HttpError as exc:
        own = next((name for name in names if f"{exc.param}.".startswith(f"{name}.")), None)
        if own is not None and exc.param is not None:
            sent = names[own] + exc.param.removeprefix(own)
            if exc.message.startswith(exc.param):
                exc.message = sent + exc.message.removeprefix(exc.param)
            exc.param = sent
        raise


# -- what is wrong with a request


def _explained(kind: type[Fields], values: Mapping[str, Any], problem: str, where: str) -> HttpError:
    """msgspec's error with the field's name as the client knows it, what is allowed and what was given."""
    found = _PATH.fullmatch(problem)
    about, place = (problem, "") if found is None else (found[1], found[2] or "")
    info: Any = msgspec.inspect.type_info(kind)
    value: Any = values
    path = where
    steps = re.findall(r"\w+", place)
    for number, step in enumerate(steps):
        inner, item = _inner(info, step), _item(value, step)
        if inner is None or (number == len(steps) - 1 and step.isdigit() and not _has_fields(inner)):
            break  # a list of plain values is named as a whole
        info, value, path = inner, item, _joined(path, step)
    if about.startswith("Object missing required field") and (fields := _fields(info)):
        name = next((each.name for each in fields if each.required and each.name not in value), "")
        info, path = _inner(info, name), _joined(path, name)
        return bad_request(f"{path} is missing: give {_rule(info)}", path)
    if about.startswith("Object contains unknown field") and isinstance(value, dict) and (fields := _fields(info)):
        known = [each.name for each in fields]
        name = next((each for each in value if each not in known), "")
        hint = did_you_mean(name, known) if len(name) < 64 else ""
        full = _joined(path, name)
        return bad_request(f"unknown field {shown(full)}{hint}", full[:80], "unknown_parameter")
    size = _too_long(info, value)
    if size is not None:
        return bad_request(f"{path} has {len(value)} {size[0]}; at most {size[1]} are allowed", path)
    return wrong(path, f"must be {_rule(info)}", value)


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _kinds(info: Any) -> Sequence[Any]:
    """A type's alternatives but for null."""
    kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    bare = [kind.type if isinstance(kind, msgspec.inspect.Metadata) else kind for kind in kinds]
    return [kind for kind in bare if not isinstance(kind, msgspec.inspect.NoneType)]


def _fields(info: Any) -> Sequence[Any]:
    return next((kind.fields for kind in _kinds(info) if isinstance(kind, msgspec.inspect.StructType)), ())


def _has_fields(info: Any) -> bool:
    return bool(_fields(info)) or any(isinstance(kind, msgspec.inspect.DictType) for kind in _kinds(info))


def _inner(info: Any, step: str) -> Any:
    """The type of a field, or of a list's entry; None where there is none."""
    if step.isdigit():
        return next((kind.item_type for kind in _kinds(info) if isinstance(kind, msgspec.inspect.ListType)), None)
    return next((field.type for field in _fields(info) if field.name == step), None)


def _item(value: Any, step: str) -> Any:
    if isinstance(value, list):
        return value[int(step)] if step.isdigit() and int(step) < len(value) else None
    return value.get(step) if isinstance(value, dict) else None


def _too_long(info: Any, value: Any) -> tuple[str, int] | None:
    """What a value has too many of, and the limit; None where it does not."""
    for kind in _kinds(info):
        most = getattr(kind, "max_length", None)
        if isinstance(value, str) and isinstance(kind, msgspec.inspect.StrType):
            return ("characters", most) if most is not None and len(value) > most else None
        is_own = isinstance(value, list) and isinstance(kind, msgspec.inspect.ListType)
        if is_own or (isinstance(value, dict) and isinstance(kind, msgspec.inspect.DictType)):
            return ("entries", most) if most is not None and len(value) > most else None
    return None


def _rule(info: Any) -> str:
    return " or ".join(map(_one_rule, _kinds(info)))


def _one_rule(kind: Any) -> str:
    match kind:
        case msgspec.inspect.IntType():
            return "a whole number" + _range(kind)
        case msgspec.inspect.FloatType():
            return "a number" + _range(kind)
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.StrType(min_length=least, max_length=most):
            return "a string" + (f" of {least} to {most} characters" if least else "")
        case msgspec.inspect.ListType(item_type=item):
            is_plain = not isinstance(item, msgspec.inspect.AnyType) and not _fields(item)
            return f"a list, each {_rule(item)}" if is_plain else "a list"
        case msgspec.inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
    return "an object"


def _range(kind: Any) -> str:
    if kind.ge is None:
        return ""
    low, high = (f"{bound:g}" if isinstance(bound, float) else bound for bound in (kind.ge, kind.le))
    return f" from {low} to {high}"


def _kind(value: object) -> str:
    """A JSON value as an error shows it: short ones themselves, else their type."""
    if isinstance(value, dict | list):
        return {dict: "an object", list: "a list"}[type(value)]
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else shown(value, 40)


# -- a body


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises HttpError 400 if it is none, is nested too deeply or is no UTF-8.

    Whole numbers of any size are exact.
    """
    if _num_containers(body) > MAX_CONTAINERS and _num_containers(_STRING.sub(b"", body)) > MAX_CONTAINERS:
        raise _no_json(f"the body has more than {MAX_CONTAINERS} lists and objects")
    try:
        value = msgspec.json.decode(body)
        _check_depth(value)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as exc:
        raise _unreadable(body, exc) from None
    if not isinstance(value, dict):
        raise _no_json(f"the body must be a JSON object, got {_kind(value)}")
    return value


def _num_containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _check_depth(value: Any) -> None:
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for below in inner for each in below if isinstance(each, dict | list)]
        if not level:
            return
    raise _too_deep()


def _unreadable(body: bytes, problem: ValueError) -> HttpError:
    """The error for a body that is no JSON, or holds what cannot be used: Python's own reader says most."""
    reason = str(problem)
    try:
        if len(body) <= _EXPLAINED_BYTES:
            _decode_slowly(body)
    except HttpError as exc:
        return exc
    except RecursionError:
        return _too_deep()
    except ValueError as exc:  # JSON, UTF-8, an integer of thousands of digits
        reason = str(exc) if isinstance(exc, json.JSONDecodeError) else "it is not UTF-8, or a number is too long"
    return _no_json(f"the body is not valid JSON: {reason}")


def _decode_slowly(body: bytes) -> None:
    value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    if any(isinstance(each, float) and not math.isfinite(each) for each in scalars(value)):
        raise bad_request("the body has a number beyond the range of a double")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad_request("the body has an unpaired UTF-16 surrogate: send whole characters") from None


def _refuse_constant(name: str) -> NoReturn:
    raise _no_json(f"the body is not valid JSON: {name} is not a JSON number")


def _too_deep() -> HttpError:
    return _no_json(f"the body is nested more than {MAX_JSON_DEPTH} levels deep")


def _no_json(message: str) -> HttpError:
    return bad_request(message, code="invalid_json")

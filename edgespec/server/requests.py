"""Reads the JSON of a request into a struct of its protocol: a wrong value is one 400 that names it, an unknown field a
note.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import msgspec

from edgespec.config.table import did_you_mean
from edgespec.errors import shown
from edgespec.server.http_errors import HttpError, bad_request

MAX_JSON_DEPTH = 64
MAX_CONTAINERS = 1 << 17  # lists and objects of a body: making them is what takes long
_MOST_UNKNOWN = 32  # fields that notes name
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]")
_PATH = re.compile(r"(.*?)(?: - at `(?:key in )?\$([\w.\[\]]*)`)?", re.DOTALL)
# msgspec looks at a struct's types when it is first read; a thread that reads it meanwhile ends the process. It holds
# the interpreter's lock in any case, so nobody waits for longer.
_ONE_READER = threading.Lock()
Asked = Mapping[str, tuple[str, tuple[Any, ...]]]
"""Fields by name: why they have no effect, and the values that ask for nothing."""


class Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object of a request, in which others have no unknown fields. A null counts as absent.

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
    for name, value in given.items():
        if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
            given[name] = int(value)  # llama-server and Ollama take 8192.0 for a number of tokens
    for name, (why, neutral) in kind.refused.items():
        value = given.pop(name, None)
        if value is not None and value not in neutral:
            raise unsupported(_joined(where, name), why)
    for name, (why, neutral) in kind.noted.items():
        value = given.pop(name, None)
        if value is not None and value not in neutral:
            notes.append(f"{_joined(where, name)}: {why}")
    unknown = sorted(given.keys() - {*kind.__struct_fields__})
    # Some clients send empty values under the names of all servers that they know.
    asked = [name for name in unknown if given.pop(name) and len(name) < 64]
    for name in asked[:_MOST_UNKNOWN]:
        hint = did_you_mean(name, [*kind.__struct_fields__, *kind.noted, *kind.refused])
        notes.append(f"{shown(_joined(where, name))}: unknown field{hint}")
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

_JSONS = {"str": "a string", "int": "an integer", "float": "a number", "bool": "a boolean"}
_JSONS |= {"array": "an array", "object": "an object"}


def _explained(kind: type[Fields], values: Mapping[str, Any], problem: str, where: str) -> HttpError:
    """msgspec's error with the field's name as the client knows it, and what was given."""
    found = _PATH.fullmatch(problem)
    about, place = (problem, "") if found is None else (found[1], found[2] or "")
    info: Any = msgspec.inspect.type_info(kind)
    value: Any = values
    path = where
    for step in re.findall(r"\w+", place):
        info, value, path = _inner(info, step), _item(value, step), _joined(path, step)
    rule, *named = about.split("`")
    known = [field.name for each in _kinds(info) for field in getattr(each, "fields", ())]
    full = _joined(path, named[0]) if named else path
    if rule.startswith("Object missing"):
        return bad_request(f"{full} is missing", full)
    if rule.startswith("Object contains"):
        return bad_request(
            f"unknown field {shown(full)}{did_you_mean(named[0], known)}", full[:80], "unknown_parameter"
        )
    if rule.startswith("Invalid enum"):
        allowed = [str(each) for one in _kinds(info) for each in getattr(one, "values", ())]
        return wrong(path, f"must be one of {', '.join(allowed)}", value)
    expected = about.partition(", got ")[0].removeprefix("Expected ").replace("`", "").replace(" | null", "")
    said = re.sub(rf"\b({'|'.join(_JSONS)})\b", lambda found: _JSONS[found[0]], expected).replace(" | ", " or ")
    return wrong(path, f"must be {said}", value)


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _kinds(info: Any) -> Sequence[Any]:
    """A type's alternatives."""
    kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    return [kind.type if isinstance(kind, msgspec.inspect.Metadata) else kind for kind in kinds]


def _inner(info: Any, step: str) -> Any:
    """The type of a field or an item; None where it is not known."""
    for kind in _kinds(info):
        for field in getattr(kind, "fields", ()):
            if field.name == step:
                return field.type
        if isinstance(kind, msgspec.inspect.ListType) and step.isdigit():
            return kind.item_type
    return None


def _item(value: Any, step: str) -> Any:
    if isinstance(value, list):
        return value[int(step)] if step.isdigit() and int(step) < len(value) else None
    return value.get(step) if isinstance(value, dict) else None


def _kind(value: object) -> str:
    """A JSON value as an error shows it: short ones themselves, else their type."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"an array of {len(value)}"
    return msgspec.json.encode(value).decode() if value is None or isinstance(value, bool) else shown(value, 40)


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
        raise _no_json(f"the body is nested more than {MAX_JSON_DEPTH} levels deep") from None
    except ValueError as exc:  # also UTF-8, and numbers beyond the range of a double
        reason = "an unpaired UTF-16 surrogate: send whole characters" if _HALF_PAIR.search(body) else exc
        raise _no_json(f"the body is not valid JSON: {reason}") from None
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
    raise RecursionError


def _no_json(message: str) -> HttpError:
    return bad_request(message, code="invalid_json")

"""JSON schemas whose `const` or `enum` has a number that no double holds, such as an id of 64 bits, as Lark rules.

The library reads every number of a schema as a double. So what leads to such a value, objects, lists, choices and
references, is written as rules here, with the value as a literal; everything beside it stays a schema. These objects
get no properties but those that the schema names, which it cannot forbid; what else cannot be written is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import shown
from edgespec.sampling.constraint.numbers import is_large, scalars

_SAYS_NOTHING = {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
_SAYS_NOTHING |= {"$schema", "$id", "$comment", "$defs", "definitions", "x-guidance"}
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "object": (dict,),
    "array": (list,),
    "boolean": (bool,),
    "null": (type(None),),
}
ONE_OF = "oneOf is taken as anyOf: its parts cannot be told apart while the answer is written"
_CLOSED = "objects with numbers beyond 2**53 get no properties but those that the schema names"


def has_large(value: Any) -> bool:
    """Whether a value that an answer is to have, or a part of it, is a number that the library would round."""
    return any(is_large(each) for each in scalars(value))


def rules_of(schema: Mapping[str, Any], start: str, layout: Mapping[str, Any], notes: list[str]) -> str:
    """Lark rules, the first of which is `start`, for a schema with such a number; "" for one without.

    `layout`: of the library's options. Raises ValueError for what cannot be written exactly.
    """
    writer = _Writer(schema, start, layout)
    if not writer.leads_to_large(schema):
        return ""
    writer.add(start, schema)
    if writer.has_closed:
        notes.append(_CLOSED)
    if writer.has_choice:
        notes.append(ONE_OF)
    return "\n".join(writer.rules)


class _Writer:
    def __init__(self, root: Mapping[str, Any], start: str, layout: Mapping[str, Any]) -> None:
        self._root, self._start, self._layout = root, start, layout
        self.rules: list[str] = []
        self._names: dict[str, str] = {}  # of rules for references
        self.has_closed = self.has_choice = False
        self._blanks = "/[ \\n\\r\\t]+/?" if layout.get("whitespace_flexible", True) else ""
        item, key = layout.get("item_separator", ","), layout.get("key_separator", ":")
        self._item, self._key = (f"{self._blanks} {_regex(each)} {self._blanks}" for each in (item, key))

    def leads_to_large(self, schema: Any) -> bool:
        """Whether a value with such a number is in `schema`, or in what it refers to."""
        rest, seen = [schema], set[str]()
        while rest:
            part = rest.pop()
            if isinstance(part, list):
                rest += part
            elif isinstance(part, dict):
                if has_large([part.get("const"), part.get("enum")]):
                    return True
                rest += (below for name, below in part.items() if name not in ("$defs", "definitions"))
                reference = part.get("$ref")
                if isinstance(reference, str) and reference not in seen:
                    seen.add(reference)
                    rest.append(self._meant(reference))
        return False

    def _meant(self, reference: str) -> Any:
        """What a reference leads to; None where that is no definition of the schema."""
        found = _DEFINITION.fullmatch(reference)
        return self._root.get(found[1], {}).get(found[2]) if found else self._root if reference == "#" else None

    def add(self, name: str, schema: Any) -> str:
        """Add a rule; its name."""
        place = len(self.rules)
        self.rules.append("")
        try:
            self.rules[place] = f"{name}: {self._expression(schema)}"
        except (AttributeError, KeyError, TypeError):  # the library, which says what is wrong, does not read this part
            raise ValueError(f"it has {shown(schema)}, which is no JSON schema") from None
        return name

    def _rule(self, schema: Any) -> str:
        return self.add(f"{self._start}_{len(self.rules)}", schema)

    def _expression(self, schema: Any) -> str:
        if not self.leads_to_large(schema):
            return self._kept_by_library(schema)
        keys = schema.keys() - _SAYS_NOTHING
        if keys <= {"type", "const"} and "const" in keys:
            return self._values([schema["const"]], schema.get("type"))
        if keys <= {"type", "enum"}:
            return self._values(schema["enum"], schema.get("type"))
        if keys == {"$ref"}:
            return self._reference(schema["$ref"])
        if keys in ({"anyOf"}, {"oneOf"}):
            self.has_choice |= "oneOf" in keys
            return " | ".join(self._rule(each) for each in schema[keys.pop()])
        if keys <= {"type", "properties", "required", "additionalProperties"} and "properties" in keys:
            return self._object(schema)
        if keys <= {"type", "items", "minItems", "maxItems"} and isinstance(schema.get("items"), dict):
            return self._list(schema)
        large = next(filter(is_large, scalars(schema)), "that it refers to")
        raise ValueError(
            f"the value {shown(large)} cannot be kept exactly beside {', '.join(sorted(keys))}: numbers beyond 2**53 "
            "can in const and enum, properties, items, anyOf and $ref to $defs, or as strings"
        )

    def _kept_by_library(self, schema: Any) -> str:
        if schema is True:
            schema = {}
        shared = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        whole = schema | shared if '"$ref"' in json.dumps(schema) else schema
        if any(not _DEFINITION.match(each) for each in re.findall(r'"\$ref": "([^"]*)', json.dumps(schema))):
            raise ValueError("beside a number beyond 2**53, $ref must lead to $defs or definitions")
        return f"%json {json.dumps(whole | {'x-guidance': self._layout})}"

    def _values(self, values: Sequence[Any], kinds: Any) -> str:
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds is not None:
            values = [each for each in values if any(_is_of(each, kind) for kind in kinds)]
        if not values:
            raise ValueError("no value of its enum has its type")
        others = [each for each in values if not has_large(each)]
        found = [json.dumps(json.dumps(each, ensure_ascii=False)) for each in values if has_large(each)]
        return " | ".join([*found, *([self._rule({"enum": others})] if others else [])])

    def _reference(self, reference: str) -> str:
        if reference not in self._names:
            self._names[reference] = f"{self._start}_{len(self.rules)}"
            self.add(self._names[reference], self._meant(reference))
        return self._names[reference]

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Properties in their order; each one that is not required may be left out."""
        self._require_type(schema, "object")
        properties, required = schema["properties"], set(schema.get("required", ()))
        if missing := sorted(required - properties.keys()):
            raise ValueError(f"required names {shown(missing[0])}, which must be among the properties here")
        self.has_closed |= schema.get("additionalProperties", True) is not False
        named = [
            (name in required, f"{json.dumps(json.dumps(name, ensure_ascii=False))} {self._key} {self._rule(below)}")
            for name, below in properties.items()
        ]
        first: list[str] = []  # the ways to begin: with each property up to the first required one
        for index, (is_required, text) in enumerate(named):
            rest = (f"({self._item} {each}){'' if needed else '?'}" for needed, each in named[index + 1 :])
            first.append(" ".join((text, *rest)))
            if is_required:
                break
        optional = "" if required else "?"
        return f'"{{" {self._blanks} ({" | ".join(first)}){optional} {self._blanks} "}}"'

    def _list(self, schema: Mapping[str, Any]) -> str:
        self._require_type(schema, "array")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        item = self._rule(schema["items"])
        if most == 0:
            return f'"[" {self._blanks} "]"'
        upper = "" if most is None else most - 1
        inner = f"{item} ({self._item} {item}){{{max(least - 1, 0)},{upper}}}"
        return f'"[" {self._blanks} ({inner}){"?" if least == 0 else ""} {self._blanks} "]"'

    def _require_type(self, schema: Mapping[str, Any], kind: str) -> None:
        if schema.get("type", kind) != kind:
            raise ValueError(f"type {shown(schema['type'])} must be {kind} here, where a number is beyond 2**53")


def _regex(text: str) -> str:
    return "/" + text.replace("/", "\\/") + "/"


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    is_whole = kind == "integer" and isinstance(value, float) and math.isfinite(value) and value.is_integer()
    return is_whole or isinstance(value, _TYPES.get(kind, ()))

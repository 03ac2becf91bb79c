"""The grammar of forced tool calls: Lark for the calls that a model's form allows, with the parameters' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from edgespec.chat.arguments import bare, kinds_of, listed_of, resolved
from edgespec.chat.tool_forms import Form
from edgespec.sampling.constraint.grammar import escaped, laid_out
from edgespec.vocabulary import Vocabulary

ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Keywords of an object schema that nothing but `properties` adds properties to.
_PLAIN_OBJECT = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}
_VALUES = ("const", "enum", "default", "examples")  # keywords that hold no schema
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_ROOT = "parameters"
_MOST_COUNTED = 500  # characters of a text: longer bounds take long to compile, and are left to the reader
Literal = Callable[[str], str]  # Lark for a text


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments. Without a word on further ones there are none: small models go on adding."""
    found = ANY_OBJECT | (tool["function"].get("parameters") or {})
    names, required = found.get("properties"), found.get("required", [])
    if not (isinstance(names, dict) and isinstance(required, list) and found.keys() <= _PLAIN_OBJECT):
        return found
    return found | {"additionalProperties": False} if all(str(name) in names for name in required) else found


def lists_arguments(tool: Mapping[str, Any]) -> bool:
    """Whether a tool's parameters name every argument, as a form that writes them one by one has to know them."""
    found = ANY_OBJECT | (tool["function"].get("parameters") or {})
    properties, required = found.get("properties", {}), found.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or found.get("type") != "object":
        return False
    has_others = not properties and bool(found.get("additionalProperties"))
    are_named = all(isinstance(name, str) and name in properties for name in required)
    return are_named and not has_others and found.keys() <= _PLAIN_OBJECT | {"additionalProperties"}


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    form: Form,
    vocabulary: Vocabulary,
    most: int,
    answer: dict[str, Any] | None,
) -> str:
    """Lark for 1 to `most` calls in a form, or else for JSON of the schema `answer`."""

    def literal(text: str) -> str:
        """A text in which control tokens may be spelled."""
        marks = "|".join(map(re.escape, form.marks))
        parts = re.split(f"({marks})", text)
        return " ".join(
            terminal(part, vocabulary) if part in form.marks else json.dumps(part) for part in parts if part
        )

    def beginning(name: str) -> str:
        """What a call begins with, in which regular expressions stand between slashes."""
        return " ".join(part if part.startswith("/") else literal(part) for part in form.head_parts(name))

    more = f" ({literal(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
    start, end = map(literal, form.around)
    lines = [f"start: {start} calls {end}{'' if answer is None else ' | answer'}", f"calls: call{more}"]
    lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
    for index, tool in enumerate(tools):
        before = beginning(tool["function"]["name"])
        arguments = f"arguments_{index}" if form.argument else _json(parameters_of(tool))
        if form.argument:
            lines += _arguments(arguments, form, parameters_of(tool), literal)
        lines.append(f"call_{index}: {before} {arguments} {literal(form.tail)}")
    if answer is not None:
        lines.append(f"answer: {literal(form.before_answer)} {_json(answer)}")
    return "\n".join(lines)


def _moved(schema: Any, root: str) -> Any:
    """`schema` with references to its own root, or below it, that point to `root` instead."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _moved_part(key, each, root) for key, each in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        found["$ref"] = root + reference[1:]
    return found


def _moved_part(key: str, part: Any, root: str) -> Any:
    if key in _VALUES:
        return part
    if key in _NAMED and isinstance(part, dict):  # its keys are names, whatever they look like
        return {name: _moved(each, root) for name, each in part.items()}
    return _moved(part, root)


def _arguments(rule: str, form: Form, parameters: Mapping[str, Any], literal: Literal) -> list[str]:
    """Rules for the arguments of one call, the required ones first, each at most once; `rule` is the first one."""
    given, listed = parameters.get("properties"), parameters.get("required")
    properties: dict[str, Any] = given if isinstance(given, dict) else {}
    required = [name for name in properties if isinstance(listed, list) and name in listed]
    optional = [name for name in properties if name not in required]
    names = {key: f"{rule}_{number}" for number, key in zip(count(), properties, strict=False)}
    between = literal(form.between_arguments)
    first = f" {between} ".join(names[key] for key in required)
    behind = " ".join(f"({between} {names[key]})?" for key in optional)
    if required or not optional:
        lines = [f"{rule}: {first} {behind}" if properties else f'{rule}: ""']
    else:  # whichever comes first has no separator before it
        starts = (
            " ".join([names[key], *(f"({between} {names[later]})?" for later in optional[place + 1 :])])
            for place, key in enumerate(optional)
        )
        lines = [f"{rule}: ({' | '.join(starts)})?"]
    place = f"#/$defs/{_ROOT}"
    shared = {"$defs": {_ROOT: _moved(parameters, place)}} if '"$ref"' in json.dumps(parameters) else {}
    for key, name in names.items():
        lines += _argument(name, form, key, _moved(resolved(properties[key], parameters), place) | shared, literal)
    return lines


def _argument(rule: str, form: Form, key: str, schema: Mapping[str, Any], literal: Literal) -> list[str]:
    """Rules for one argument, with what its schema refers to. A text is free up to the mark behind it, or listed."""
    opened, closed, quote = literal(form.argument.replace("{key}", key)), literal(form.closed), literal(form.quote)
    # A bare form has no quotation marks that would tell a text from anything else.
    kinds = kinds_of(schema, schema)
    if not (form.quote or form.closed) or "string" not in kinds or (kinds != {"string"} and not form.closed):
        return [f"{rule}: {opened} {_json(schema)} {closed}"]
    listed = listed_of(schema, schema)
    if listed is not None:
        marks = [quote if isinstance(value, str) else "" for value in listed]
        texts = [f"{mark} {literal(bare(value))} {mark}" for mark, value in zip(marks, listed, strict=True)]
        return [f"{rule}: {opened} ({' | '.join(texts)}) {closed}"]
    least, most = (schema.get(f"{end}Length") for end in ("min", "max"))
    letters = f"(?s:.{{{least if _is_count(least) else 0},{most if _is_count(most) else ''}}})"
    if quote.startswith("<["):  # a control token is no text, so the text ends before it
        return [f"{rule}: {opened} {quote} {rule}_text {quote} {closed}", f"{rule}_text: /{letters}/"]
    end = escaped(form.quote + form.closed)
    return [f"{rule}: {opened} {quote} {rule}_text", f"{rule}_text[lazy]: /{letters}{end}/"]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_COUNTED  # True is an int to isinstance


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(laid_out(schema))}"


def terminal(mark: str, vocabulary: Vocabulary) -> str:
    """Lark for a mark: a control token, or text where the vocabulary has no such token."""
    ids = vocabulary.encode(mark, parse_special=True)
    is_control = len(ids) == 1 and not vocabulary.piece(ids[0])
    return f"<[{ids[0]}]>" if is_control else json.dumps(mark)

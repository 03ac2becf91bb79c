"""The grammar of forced tool calls: Lark for the calls that a model's form allows, with the parameters' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from edgespec.chat.argument_forms import ArgumentForm
from edgespec.chat.tools import ToolParser
from edgespec.sampling.constraint.grammar import escaped, laid_out
from edgespec.vocabulary import Vocabulary

ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Keywords of an object schema that nothing but `properties` adds properties to.
_PLAIN_OBJECT = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}
_SHARED = ("$defs", "definitions")
_MOST_COUNTED = 500  # characters of a text: longer bounds take long to compile, and are left to the reader
Literal = Callable[[str], str]  # Lark for a text


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments. Without a word on further ones there are none: small models go on adding."""
    found = ANY_OBJECT | (tool["function"].get("parameters") or {})
    names, required = found.get("properties"), found.get("required", [])
    if not (isinstance(names, dict) and isinstance(required, list) and found.keys() <= _PLAIN_OBJECT):
        return found
    return found | {"additionalProperties": False} if all(str(name) in names for name in required) else found


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    parser: type[ToolParser],
    vocabulary: Vocabulary,
    most: int,
    answer: dict[str, Any] | None,
) -> str:
    """Lark for 1 to `most` calls in the form that `parser` reads, or else for JSON of the schema `answer`."""

    def literal(text: str) -> str:
        """A text in which control tokens may be spelled, or a regular expression between slashes."""
        if text.startswith("/"):
            return text
        marks = "|".join(map(re.escape, parser.marks))
        parts = re.split(f"({marks})", text)
        return " ".join(
            terminal(part, vocabulary) if part in parser.marks else json.dumps(part) for part in parts if part
        )

    more = f" ({literal(parser.between)} call){{0,{most - 1}}}" if most > 1 else ""
    start, end = map(literal, parser.around_all)
    lines = [f"start: {start} calls {end}{'' if answer is None else ' | answer'}", f"calls: call{more}"]
    lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
    for index, tool in enumerate(tools):
        before = " ".join(map(literal, parser.before(tool["function"]["name"])))
        if issubclass(parser, ArgumentForm):
            arguments = f"arguments_{index}"
            lines += _arguments(arguments, parser, parameters_of(tool), literal)
        else:
            arguments = _json(_call_schema(tool, parser))
        lines.append(f"call_{index}: {before} {arguments} {literal(parser.after)}")
    if answer is not None:
        lines.append(f"answer: {literal(parser.before_answer)} {_json(answer)}")
    return "\n".join(lines)


def _call_schema(tool: Mapping[str, Any], parser: type[ToolParser]) -> dict[str, Any]:
    """The JSON of one call. What its parameters share by reference lies at the top, where references look for it."""
    parameters = parameters_of(tool)
    shared = {name: parameters.pop(name) for name in _SHARED if name in parameters}
    return parser.schema(tool["function"]["name"], parameters) | shared


def _arguments(rule: str, form: type[ArgumentForm], parameters: Mapping[str, Any], literal: Literal) -> list[str]:
    """Rules for the arguments of one call, the required ones first, each at most once; `rule` is the first one."""
    properties: dict[str, Any] = parameters.get("properties") or {}
    required = [name for name in parameters.get("required", []) if name in properties]
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
    shared = {name: parameters[name] for name in _SHARED if name in parameters}
    for key, name in names.items():
        lines += _argument(name, form, key, properties[key], shared, literal)
    return lines


def _argument(
    rule: str, form: type[ArgumentForm], key: str, schema: Any, shared: Mapping[str, Any], literal: Literal
) -> list[str]:
    """Rules for one argument. A text is free up to the mark behind it, or one of those that its schema lists."""
    opened, closed = literal(form.opened(key)), literal(form.closed)
    known = schema if isinstance(schema, dict) else {}
    is_text = known.get("type") == "string" and not form.is_json
    if not is_text:
        return [f"{rule}: {opened} {_json({**known, **shared})} {closed}"]
    quote = literal(form.quote)
    listed = known.get("enum", [known["const"]] if "const" in known else None)
    if isinstance(listed, list):
        texts = " | ".join(literal(str(text)) for text in listed)
        return [f"{rule}: {opened} {quote} ({texts}) {quote} {closed}"]
    least, most = (known.get(f"{end}Length") for end in ("min", "max"))
    letters = f"(?s:.{{{least if _is_count(least) else 0},{most if _is_count(most) else ''}}})"
    if quote.startswith("<["):  # a control token is no text, so the text ends before it
        return [f"{rule}: {opened} {quote} {rule}_text {quote} {closed}", f"{rule}_text: /{letters}/"]
    end = escaped(form.quote + form.closed)
    return [f"{rule}: {opened} {quote} {rule}_text", f"{rule}_text[lazy]: /{letters}{end}/"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 < value <= _MOST_COUNTED


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(laid_out(schema))}"


def terminal(mark: str, vocabulary: Vocabulary) -> str:
    """Lark for a mark: a control token, or text where the vocabulary has no such token."""
    ids = vocabulary.encode(mark, parse_special=True)
    is_control = len(ids) == 1 and not vocabulary.piece(ids[0])
    return f"<[{ids[0]}]>" if is_control else json.dumps(mark)

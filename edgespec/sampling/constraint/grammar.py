"""What a request asks its answer to be: a JSON schema, a grammar (Lark or GBNF) or a regular expression.

`compiled` turns it into a matcher, and a mistake in it into one error that names the place.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from edgespec.config import GenerateOptions
from edgespec.errors import ConfigError
from edgespec.sampling.constraint.divisors import embedded_schemas, refuse_large_divisors
from edgespec.sampling.constraint.library import Library
from edgespec.sampling.constraint.words import in_plain_words

if TYPE_CHECKING:
    from llguidance import LLMatcher

Kind = Literal["json_schema", "grammar", "regex"]
# As Python's json.dumps writes it. One fixed layout leaves punctuation no choice, so that it can be drafted, and a
# model cannot fill an answer with blanks. A schema may ask for another one under "x-guidance".
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAPS, _LISTS, _SINGLE = (
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
    ("anyOf", "oneOf", "allOf", "prefixItems"),
    ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
)
_TO_ESCAPE, _ESCAPED = re.compile(r"(?s)\\.|[/\n]"), {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
_LARK = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\[])+/|//[^\n]*|\b[A-Z][A-Z0-9_]*\b')
_CLASS = re.compile(r"(?s)\[\^((?:\\.|[^\]\\])*)\]")
_CODE_POINT = re.compile(r"(?s)\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)")
_MOST_PLACES = 256  # parts of a schema that are tried to find the one at fault


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` of a JSON schema, a Lark or GBNF grammar, or a regular expression.

    `free_until`: the answer is free up to and including this text; None: the grammar holds from its first token on.
    """

    kind: Kind
    text: str
    free_until: str | None = None

    @classmethod
    def of(cls, options: GenerateOptions) -> Self | None:
        """What the options ask for; None where an answer is free."""
        kinds: tuple[Kind, ...] = ("json_schema", "grammar", "regex")
        given = ((kind, getattr(options, kind)) for kind in kinds)
        return next((cls(kind, text, options.free_until) for kind, text in given if text is not None), None)

    @property
    def source(self) -> str:
        """In llguidance's own form. Raises ConfigError for a GBNF grammar that does not parse."""
        grammars = [_body(self.kind, self.text)]
        if self.free_until is not None:
            # A lazy rule is over as soon as the text is complete; models put empty lines behind it.
            lark = f"start: preamble gap @body\npreamble[lazy]: /(?s:.*){escaped(self.free_until)}/\ngap: /\\n{{0,2}}/"
            grammars = [{"lark_grammar": lark}, {"name": "body"} | grammars[0]]
        return json.dumps({"grammars": grammars})


def _body(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "json_schema":
        return {"json_schema": laid_out(_parsed(text))}
    if kind == "regex":
        return {"lark_grammar": f"start: TEXT\nTEXT: /{_slashed(text)}/"}
    return {"lark_grammar": _as_lark(text)}


def _parsed(text: str) -> dict[str, Any]:
    """The JSON schema `text` as the library is given it."""
    return _cleaned(json.loads(text))


def _cleaned(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema`, changed: without what asks for nothing but is a word that the library refuses."""
    for _, part in _all_parts(schema):
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = _CLASS.sub(_without_controls, pattern)
    return schema


def _without_controls(found: re.Match[str]) -> str:
    """The library lets a class that leaves out a quotation mark or backslash, but no control character, have them."""
    return f"[^\\x00-\\x1f{found[1]}]" if '"' in found[1] or "\\\\" in found[1] else found[0]


def laid_out(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with the layout of the JSON that it describes, where it gives none itself."""
    own = schema.get("x-guidance")
    return {**_cleaned(deepcopy(dict(schema))), "x-guidance": LAYOUT | (own if isinstance(own, dict) else {})}


def _as_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

    if is_lark_syntax(text):
        return text
    try:
        lark = str(any_to_lark(_CODE_POINT.sub(_spelled, text)))
    except Exception as exc:  # a rule that is missing has no type of its own there
        raise ConfigError(f"grammar cannot be used: {str(exc) or 'it is nested too deeply'}") from exc
    # Rules without others become terminals, which read as much as they can: GBNF's rules try every length.
    names = set(re.findall(r"(?m)^([A-Z][A-Z0-9_]*)\s*:", lark))
    return _LARK.sub(lambda found: found[0].lower() if found[0] in names else found[0], lark)


def _spelled(found: re.Match[str]) -> str:
    """A character that GBNF gives by its number; the library drops the zeros and reads letters behind it as digits."""
    number = int(found[1] or found[2] or "0", 16)
    if not (found[1] or found[2]) or number > sys.maxunicode or 0xD800 <= number < 0xE000:
        return found[0]
    letter = chr(number)
    return letter if number >= 0x80 or letter.isalnum() else f"\\x{number:02x}"


def _slashed(regex: str) -> str:
    """`regex` between slashes, as Lark writes it."""
    return _TO_ESCAPE.sub(lambda found: _ESCAPED.get(found[0], found[0]), regex)


def escaped(text: str) -> str:
    """A regular expression for `text` itself, between slashes."""
    return _slashed(
        "".join(letter if letter.isalnum() or letter in " _" else f"\\x{{{ord(letter):x}}}" for letter in text)
    )


def compiled(grammar: Grammar, library: Library) -> LLMatcher:
    """A matcher at the beginning of an answer. Raises ConfigError, which names the place of a mistake."""
    try:
        return _compiled(grammar, library)
    except RecursionError as exc:
        raise ConfigError(f"{grammar.kind} cannot be used: it is nested too deeply") from exc


def _compiled(grammar: Grammar, library: Library) -> LLMatcher:
    schema = _parsed(grammar.text) if grammar.kind == "json_schema" else None
    for each in embedded_schemas(grammar.text) if schema is None else (schema,):
        refuse_large_divisors(each, grammar.kind)
    matcher = library.matcher(grammar.source)
    if not matcher.is_error():
        if schema is not None:
            _refuse_counts(schema)
        return matcher
    problem = matcher.get_error().strip()
    if schema is not None:
        raise ConfigError(
            f"json_schema cannot be used: {_place(schema, problem, library)}{_first_line(in_plain_words(problem))}"
        )
    raise ConfigError(f"{grammar.kind} cannot be used: {in_plain_words(problem)}")


def _refuse_counts(schema: dict[str, Any]) -> None:
    """Raises ConfigError for a `minProperties` that a repeated name would meet: the library counts it every time."""
    for path, part in _all_parts(schema):
        least, required = part.get("minProperties", 0), part.get("required", [])
        if not (isinstance(least, int) and isinstance(required, list)):
            continue  # in a definition that nothing uses, which the library did not read
        named = len({name for name in required if isinstance(name, str)})
        if least > named + 1:
            place = f"at {path}: " if path else ""
            raise ConfigError(
                f"json_schema cannot be used: {place}minProperties {least} cannot be kept, as an answer may repeat a "
                f"name: list all names but one under required, where {named} are now"
            )


def _all_parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, schema) of a schema and of all inside it."""
    rest = [("", schema)]
    while rest:
        path, part = rest.pop()
        yield path, part
        rest += [(f"{path}.{name}" if path else name, below) for name, below in _parts(part)]


def _first_line(problem: str) -> str:
    """Errors of a pattern take several lines: the pattern, a mark and the reason."""
    return " ".join(problem.split())


def _place(schema: dict[str, Any], problem: str, library: Library) -> str:
    """`at properties.age: `, the smallest part of `schema` that has the same problem alone; empty for the whole."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path, part, tried = "", schema, 0
    while True:
        for name, below in _parts(part):
            tried += 1
            if tried > _MOST_PLACES:
                return f"at {path}: " if path else ""
            found = library.matcher(json.dumps({"grammars": [{"json_schema": shared | below}]}))
            if found.is_error() and found.get_error().strip() == problem:
                path, part = f"{path}.{name}" if path else name, below
                break
        else:
            return f"at {path}: " if path else ""


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside a schema, with their names."""
    for key in _MAPS:
        inner = schema.get(key)
        for name, part in inner.items() if isinstance(inner, dict) else ():
            if isinstance(part, dict):
                yield f"{key}.{name}", part
    for key in _LISTS:
        listed = schema.get(key)
        for index, part in enumerate(listed) if isinstance(listed, list) else ():
            if isinstance(part, dict):
                yield f"{key}.{index}", part
    for key in _SINGLE:
        if isinstance(part := schema.get(key), dict):
            yield key, part

"""What a request asks its answer to be: a JSON schema, a grammar (Lark or GBNF) or a regular expression.

`compiled` turns it into a matcher, and a mistake in it into one error that names the place. JSON schemas are made what
llguidance takes: with formats that it knows, and numbers that a double holds. It reads every number as a double, and
ranges of integers as int64: another value would be allowed than the one that was asked for, and a range that begins at
-2**63 never ends.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeGuard

from edgespec.config.options import GenerateOptions
from edgespec.contained import Containment, Overrun
from edgespec.errors import ConfigError, shown
from edgespec.platform.machine import on_stack
from edgespec.sampling.constraint.library import Library, in_plain_words, tried

if TYPE_CHECKING:
    from llguidance import LLMatcher

Kind = Literal["json_schema", "grammar", "regex"]
# As Python's json.dumps writes it. One fixed layout leaves punctuation no choice, so that it can be drafted, and a
# model cannot fill an answer with blanks. A schema may ask for another one under "x-guidance". Which of `oneOf` is
# meant where several fit is only known at the end: it is taken as anyOf.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
# llguidance calls itself once for each link of a chain of rules or references: 10 KiB of stack each at most, measured
# for objects, whose 1,000 overflow the 8 MiB of a thread on Linux. It limits nesting itself, but neither chains nor the
# time that a schema takes, which doubles with each `anyOf` that is merged into another (1.5 kB: 11 s). So it compiles
# every grammar in a child first, on a stack for 4,000 links, and here what has passed there, on twice as much.
_MOST_LEVELS = 120  # of lists and objects, as the library's reader of JSON has it
_MOST_SAID = 800  # characters
_STACK_BYTES = 72 << 20  # reserved, and used as far as a chain is long
ONE_OF = "oneOf is taken as anyOf: its parts cannot be told apart while the answer is written"
_CHILDREN = Containment(__name__, most=4, limit_s=2.0, niceness=10)
_TO_ESCAPE, _ESCAPED = re.compile(r"(?s)\\.|[/\n]"), {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
_CODE_POINT = re.compile(r"(?s)\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)")
_WORDS, _LARK_NAME, _OTHER_NAME = re.compile(r"([a-z])([A-Z])"), re.compile(r"[a-z][a-z0-9_]*"), "rule_number_"


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


def laid_out(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with the layout of the JSON that it describes, where it gives none itself."""
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": LAYOUT | (own if isinstance(own, dict) else {})}


def _as_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import is_lark_syntax

    if is_lark_syntax(text):
        return text
    try:
        return _of_gbnf(_CODE_POINT.sub(_spelled, text))
    except ConfigError:
        raise
    except Exception as exc:  # the reader's errors have no common type
        raise ConfigError(f"grammar cannot be used: {str(exc) or 'it is nested too deeply'}") from exc


def _of_gbnf(text: str) -> str:
    """A GBNF grammar as Lark. All rules stay rules, which try every length: Lark's terminals read as much as they can.

    The library's own way from the parsed rules on takes time with the square of their number.
    """
    from llguidance.gbnf_to_lark import GrammarParser, RuleRefNode

    rules = GrammarParser().parse(text)
    if "root" not in rules:
        raise ConfigError("grammar cannot be used: No 'root' rule found")
    names, taken = {"root": "start"}, {"start"}
    for number, name in enumerate(rules):
        lark = _WORDS.sub(r"\1_\2", name.replace("-", "_")).lower()
        if lark in taken or not _LARK_NAME.fullmatch(lark):
            lark = f"{_OTHER_NAME}{number}"
        taken.add(lark)
        names.setdefault(name, lark)
    for rule in rules.values():
        rule.alternatives = rule.alternatives.simplify()
        rest = [rule]
        while rest:
            node = rest.pop()
            if isinstance(node, RuleRefNode):
                if node.name not in rules:
                    raise ConfigError(f"grammar cannot be used: Rule '{node.name}' not found")
                node.name = names[node.name]
            rest += node.children()
        rule.name = names[rule.name]
    return "%llguidance {}\n\n" + "\n".join(map(str, rules.values()))


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


class Checked(NamedTuple):
    """A grammar that compiles. `source`: in llguidance's own form; `notes`: what of it is not kept."""

    source: str
    notes: tuple[str, ...] = ()


def compiled(grammar: Grammar, library: Library) -> tuple[LLMatcher, Checked]:
    """A matcher at the beginning of an answer. Raises ConfigError, which names the place of a mistake."""
    try:
        found = _CHILDREN.run(checked, grammar)
    except Overrun as exc:
        raise ConfigError(f"{grammar.kind} cannot be used: {exc}; use a simpler one") from exc
    matcher = on_stack(2 * _STACK_BYTES, lambda: library.matcher(found.source))
    if matcher.is_error():
        raise ConfigError(f"{grammar.kind} cannot be used: {_short(matcher.get_error().strip())}")
    return matcher, found


def checked(grammar: Grammar) -> Checked:
    """`grammar` without a mistake that shows before tokens are known. To be called in a child process."""
    try:
        return _checked(grammar)
    except RecursionError as exc:
        raise ConfigError(
            f"{grammar.kind} cannot be used: it is nested too deeply: {_MOST_LEVELS} levels are allowed"
        ) from exc


def _checked(grammar: Grammar) -> Checked:
    notes: list[str] = []
    schema: dict[str, Any] | None = None
    if grammar.kind == "json_schema":
        schema = cleaned(json.loads(grammar.text), grammar.kind, notes)
        body: dict[str, Any] = {"json_schema": laid_out(schema)}
    elif grammar.kind == "regex":
        body = {"lark_grammar": f"start: TEXT\nTEXT: /{_slashed(grammar.text)}/"}
    else:
        body = {"lark_grammar": with_cleaned_schemas(_as_lark(grammar.text), notes)}
    grammars = [body]
    if grammar.free_until is not None:
        # A lazy rule is over as soon as the text is complete; models put empty lines behind it.
        lark = f"start: preamble gap @body\npreamble[lazy]: /(?s:.*){escaped(grammar.free_until)}/\ngap: /\\n{{0,2}}/"
        grammars = [{"lark_grammar": lark}, {"name": "body"} | body]
    source = json.dumps({"grammars": grammars})
    problem, warnings = on_stack(_STACK_BYTES, lambda: tried(source))
    if problem and schema is not None:
        if problem.startswith("recursion limit"):
            raise RecursionError
        # Errors of a pattern take several lines: the pattern, a mark and the reason.
        raise ConfigError(f"json_schema cannot be used: {_short(' '.join(problem.split()))}")
    if "row has" in problem:
        raise ConfigError(f"{grammar.kind} cannot be used: {_short(problem)}")
    notes += [ONE_OF] if any("oneOf" in each for each in warnings) else []
    return Checked(source, tuple(notes))


def _short(problem: str) -> str:
    """An error of the library in plain words, without the middle of a long pattern; the reason is at its end."""
    problem = in_plain_words(problem)
    return problem if len(problem) <= _MOST_SAID else f"{problem[: _MOST_SAID // 2]} ... {problem[-_MOST_SAID // 2 :]}"


# -- JSON schemas as the library takes them

Part = tuple[str, dict[str, Any]]  # the path of a schema within another, and the schema
# Those that the library keeps. JSON schema itself asks for none to be kept: the others are notes on what a text is.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_VALUES = ("const", "enum")
_NO_SCHEMAS = (*_VALUES, "default", "examples", "example")
_CLASS = re.compile(r"(?s)\[\^((?:\\.|[^\]\\])*)\]")
_EMBEDDED = "%json"
_MOST_NOTES = 8
_FAR = 2**63 - 1024  # the largest double within int64: a bound behind it is a bound of that type, not of the values
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}


def cleaned(schema: dict[str, Any], kind: str, notes: list[str]) -> dict[str, Any]:
    """`schema`, changed to what the library keeps exactly; `notes` gets what of it is not kept.

    Raises ConfigError for what cannot be kept.
    """
    parts = list(all_parts(schema))
    for path, part in parts:
        try:
            _clean(part, notes)
        except ValueError as exc:
            raise ConfigError(f"{kind} cannot be used: {at(path)}{exc}") from None
    _refuse_counts(parts, kind)
    return schema


def _clean(part: dict[str, Any], notes: list[str]) -> None:
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    if isinstance(pattern := part.get("pattern"), str):
        part["pattern"] = _CLASS.sub(_without_controls, pattern)
    if isinstance(form := part.get("format"), str) and form not in _FORMATS:
        del part["format"]
        kinds = part.get("type", "string")
        is_of_texts = isinstance(kinds, str | list) and "string" in kinds
        note = f"the format {shown(form, 40)} is not enforced"
        if is_of_texts and note not in notes and len(notes) < _MOST_NOTES:
            notes.append(note)
    for name in _VALUES:
        _require_exact(part.get(name))
    part.update(_with_bounds(part))


def _without_controls(found: re.Match[str]) -> str:
    """The library lets a class that leaves out a quotation mark or backslash, but no control character, have them."""
    return f"[^\\x00-\\x1f{found[1]}]" if '"' in found[1] or "\\\\" in found[1] else found[0]


def _refuse_counts(parts: list[Part], kind: str) -> None:
    """Raises ConfigError for a `minProperties` that a repeated name would meet: the library counts it every time."""
    for path, part in parts:
        least, required = part.get("minProperties", 0), part.get("required", [])
        if not (isinstance(least, int) and isinstance(required, list)):
            continue  # in a definition that nothing uses, which the library does not read
        named = len({name for name in required if isinstance(name, str)})
        if least > named + 1:
            raise ConfigError(
                f"{kind} cannot be used: {at(path)}minProperties {least} cannot be kept, as an answer may repeat a "
                f"name: list all names but one under required, where {named} are now"
            )


def all_parts(schema: dict[str, Any]) -> Iterator[Part]:
    """A schema and all inside it, also where only a `$ref` finds them; not the values that answers are to have."""
    rest: list[tuple[str, Any, bool]] = [("", schema, True)]  # path, value, whether its keys are keywords
    while rest:
        path, part, has_keywords = rest.pop()
        if isinstance(part, dict):
            if has_keywords:
                yield path, part
            for name, below in part.items():
                if not (has_keywords and name in _NO_SCHEMAS):
                    rest.append((f"{path}.{name}" if path else name, below, not (has_keywords and name in _NAMED)))
        elif isinstance(part, list):
            rest += [(f"{path}.{index}", below, True) for index, below in enumerate(part)]


def at(path: str) -> str:
    """`path` as errors name it."""
    return f"at {path}: " if path else ""


def with_cleaned_schemas(lark: str, notes: list[str]) -> str:
    """A Lark grammar with the JSON schemas in it `cleaned`; one that does not parse is left to the library."""
    before, *others = lark.split(_EMBEDDED)
    found = [before]
    for part in others:
        try:
            blank = len(part) - len(part.lstrip())
            schema, end = json.JSONDecoder().raw_decode(part, blank)
        except (ValueError, RecursionError):
            schema, end = None, 0
        if isinstance(schema, dict):
            part = f" {json.dumps(cleaned(schema, 'grammar', notes))}{part[end:]}"
        found.append(part)
    return _EMBEDDED.join(found)


# -- numbers


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_bounds(part: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds of one schema as the library keeps them; {} where they are already. Raises ValueError.

    Bounds at or behind those of int64 become the nearest doubles within it.
    """
    changed: dict[str, Any] = {}
    for name, side in _BOUNDS.items():
        bound = part.get(name)
        if not _is_number(bound):
            continue
        if abs(bound) >= _FAR:
            if (bound > 0) != (side > 0):
                raise ValueError(
                    f"{name} {shown(bound)} leaves only numbers behind 2**63, which cannot be kept exactly"
                )
            changed[name] = side * _FAR
        elif not _is_exact(bound):
            raise ValueError(f"{name} {shown(bound)} cannot be kept exactly: take {int(float(bound))}, or a string")
    return changed


def _require_exact(values: Any) -> None:
    """Raises ValueError for a number, in a value that an answer is to have, that the library would round."""
    for each in scalars(values):
        if _is_number(each) and (abs(each) >= _FAR or not _is_exact(each)):
            raise ValueError(f"the value {shown(each)} cannot be kept exactly: take one within 2**53, or a string")


def _is_exact(value: float) -> bool:
    return math.isfinite(value) and int(float(value)) == value if isinstance(value, int) else math.isfinite(value)


def scalars(value: Any) -> Iterator[Any]:
    """Everything in a JSON value that is no list or object."""
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, dict):
            rest += each.values()
        elif isinstance(each, list):
            rest += each
        else:
            yield each

"""What a request asks its answer to be: a JSON schema, a grammar (Lark or GBNF) or a regular expression.

`compiled` turns it into a matcher, and a mistake in it into one error that names the place.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from edgespec.config.options import GenerateOptions
from edgespec.contained import Containment, Overrun
from edgespec.errors import ConfigError
from edgespec.platform.machine import on_stack
from edgespec.sampling.constraint.library import Library, in_plain_words, tried
from edgespec.sampling.constraint.schema import cleaned, with_cleaned_schemas

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

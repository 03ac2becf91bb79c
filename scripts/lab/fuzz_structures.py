"""Cases of `fuzz.py` with what strangers write: JSON schemas and grammars.

A case ends badly when the process dies, nothing is said for too long, or a finished answer does not match its schema
without a note that says so.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.errors import EdgespecError
from edgespec.runtime import Model
from fuzz_cases import Case, Garbage, Known

MOST_S = 90.0  # for a case: one that is ended takes about 3, and took 34 beside ten other programs on two cores
NUMBERS = (
    *(0, 1, -1, 7, 0.1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64),
    *(1e30, -1e300, 10**40),
)
_FORMATS = ("date", "uuid", "password", "uri-reference", "int64", "email", "x")
_PATTERNS = ("^a+$", "(a|b)*c", '[^"]{1,9}', "^(a?){40}$", "(", "\\d{3}", "^(x+x+)+y$", "\\p{L}", "a{99999}")
_ODD: tuple[Any, ...] = (
    *(None, True, 5, -1, 1e300, "", "x", [], {}, [5], [[]], {"a": 5}, "\0", "#/", ["string", 5], 10**40),
)
_opened: list[Model] = []  # a process that runs several cases loads once


def cases(rng: random.Random, index: int, known: Known) -> Case:
    """Case `index` of this kind."""
    return (schema_case, grammar_case)[index % 2](rng)


def model() -> Model:
    if not _opened:
        _opened.append(edgespec.load("demo", threads=1, drafter="none"))
    return _opened[0]


def schema(rng: random.Random, depth: int = 4) -> Any:
    """A schema of any kind, most of them usable."""
    if depth == 0 or rng.random() < 0.2:
        kinds: tuple[Any, ...] = {}, True, {"type": "null"}, {"type": "integer"}, {"const": rng.choice(NUMBERS)}
        return rng.choice((*kinds, {"type": "string", "maxLength": 4}))

    def inner() -> Any:
        return schema(rng, depth - 1)

    def one(**choices: Sequence[Any]) -> dict[str, Any]:
        return {name: rng.choice(each) for name, each in choices.items()}

    names = rng.sample("abcdef", rng.randint(1, 4))
    limits = rng.sample(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), 2)
    required = rng.sample(names, rng.randint(0, len(names)))
    refs = "#", "#/$defs/a", "#/$defs/b", "#/nowhere", "http://example.com/x"
    makers: tuple[Callable[[], Any], ...] = (
        lambda: one(type=("integer", "number"), **dict.fromkeys(limits, NUMBERS)),
        lambda: {"type": "string"} | one(format=_FORMATS, maxLength=(4, 20, 10**6)),
        lambda: {"type": "string"} | one(pattern=_PATTERNS),
        lambda: {"enum": rng.sample((*NUMBERS, "a", None, [1], {"a": 2**60 + 1}), 3)},
        lambda: {"type": "array", "items": inner()} | one(minItems=(0, 1, 3), maxItems=(2, 3, 10**5)),
        lambda: {"type": "array", "prefixItems": [inner(), inner()]} | one(items=(False, inner())),
        lambda: {
            "type": "object",
            "properties": {name: inner() for name in names},
            "required": required,
            **one(additionalProperties=(False, inner())),
        },
        lambda: {rng.choice(("anyOf", "oneOf", "allOf")): [inner() for _ in range(rng.randint(1, 3))]},
        lambda: {"$ref": rng.choice(refs)},
        lambda: {rng.choice(("not", "if", "contains", "propertyNames")): inner()},
        lambda: {"type": "object", "patternProperties": {rng.choice(_PATTERNS): inner()}},
    )
    return rng.choice(makers)()


def _damage(rng: random.Random, given: dict[str, Any]) -> None:
    """Have one keyword somewhere in a schema hold what it never holds."""
    place: Any = given
    while isinstance(below := rng.choice(list(place.values()) or [0]), dict) and below and rng.random() < 0.8:
        place = below
    place[rng.choice([*place, "type", "format", "enum", "required", "items", "$ref", "pattern"])] = rng.choice(_ODD)


def schema_case(rng: random.Random) -> Case:
    given = {"$defs": {"a": schema(rng, 2), "b": schema(rng, 2)}}
    found = schema(rng)
    given |= found if isinstance(found, dict) else {}
    if rng.random() < 0.3:
        _damage(rng, given)
    seed = rng.randrange(1000)

    def run(folder: Path) -> None:
        options = GenerateOptions(max_tokens=60, json_schema=given)
        result = _timed(lambda: model().generate("{", Sampling(temperature=0.8, seed=seed), options))
        if result.finish_reason == "stop" and not any("whole schema" in note for note in result.stats.notes):
            _require_match(given, result.text)

    return Case(f"schema: {json.dumps(given)[:200]}", run)


def _require_match(given: Any, text: str) -> None:
    from jsonschema.validators import Draft202012Validator
    from referencing import Registry

    try:
        value = json.loads(text)
        wrong = [error.message for error in Draft202012Validator(given, registry=Registry()).iter_errors(value)]
    except Exception as exc:  # a pattern that Python does not know
        print(type(exc).__name__)
        return
    if wrong:
        raise Garbage(f"{text[:200]} does not match {json.dumps(given)[:600]}: {wrong[0][:200]}")


def grammar(rng: random.Random) -> tuple[str, str]:
    """(the option, its text)."""
    size = rng.choice((3, 30, 300, 1500, 3000, 5000))
    chance = rng.random()
    if chance < 0.2:
        deep, wide = "(a|" * size + "b" + ")" * size, "|".join(f"a{i}b" for i in range(size))
        return "regex", rng.choice((*_PATTERNS, deep, f"(?:a{{1,{size}}}){{{size}}}", wide))
    if chance < 0.6:
        body = rng.choice(('"a" r{next}', 'r{next} | r{next} "a"', 'r{next}? "a"', '("a" r{next})*', "r{next} r{next}"))
        rules = "\n".join(f"r{i} ::= " + body.replace("{next}", str(i + 1)) for i in range(size))
        last = rng.choice(("[a-c]", '"x"', "r0", "missing"))
        return "grammar", rng.choice(("", "# x\n")) + f"root ::= r0\n{rules}\nr{size} ::= {last}"
    name, number = rng.choice(("r", "T")), '%json {"type": "integer", "minimum": -9223372036854775808} {next}'
    bodies = '"a" {next}', "{next}", '{next} | {next} "b"', "({next})?", "{next}{2,300}", "/a+/ {next}", number
    body = rng.choice(bodies)
    lines = [f"{name}{i}: " + body.replace("{next}", f"{name}{i + 1}") for i in range(size)]
    return "grammar", f"start: {name}0\n" + "\n".join(lines) + f'\n{name}{size}: "x"'


def grammar_case(rng: random.Random) -> Case:
    kind, text = grammar(rng)
    if rng.random() < 0.2:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(("(", ")", "\\", '"', "|", "\0", "~", "&", "<[5]>", "%ignore /a/\n")) + text[at:]

    def run(folder: Path) -> None:
        given: dict[str, Any] = {kind: text}
        _timed(lambda: model().generate("a", Sampling(seed=1), GenerateOptions(max_tokens=24, **given)))

    return Case(f"grammar: {kind} {len(text)} {text[:160]!r}", run)


def _timed(work: Callable[[], Any]) -> Any:
    began_s = time.monotonic()
    try:
        return work()
    except EdgespecError as exc:
        if len(str(exc)) > 4000:
            raise Garbage(f"an error of {len(str(exc))} characters") from exc
        raise
    finally:
        if (took_s := time.monotonic() - began_s) > MOST_S:
            raise Garbage(f"it took {took_s:.0f} s")

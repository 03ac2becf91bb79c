"""Masks, forced tokens and cut drafts are functions of the text, and the loop stays exact under them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from demo import DEMO
from edgespec import GenerateOptions, Sampling
from edgespec.config.options import MAX_GRAMMAR_CHARACTERS
from edgespec.control.base import FixedLength
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import CapabilityError, ConfigError, EngineError
from edgespec.generation.run_state import Run
from edgespec.sampling.acceptance import RULES
from edgespec.sampling.constraint.grammar import Grammar, compiled
from edgespec.sampling.constraint.library import Library
from edgespec.sampling.constraint.state import Constraint, Constraints, Mask
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import Draft
from lossless import ALPHA_1E6, PLAIN, chi_square_score, speculative
from table_engine import TableEngine

SIZE = 7
END = SIZE - 1
PROMPT = np.array([0, 1], np.int32)
FORCING = Grammar("regex", "(a(bcde|cedb)[abf]{2}){4,30}")
PARITY = Grammar("regex", "([abc][cdef])*")  # even places: a, b, c; odd ones: c, d, e, f


def table(order: int = 2, **fields: Any) -> TableEngine:
    return TableEngine.random(SIZE, order=order, seed=3, spread=1.5, context_length=600, end_id=END, **fields)


def constraint(grammar: Grammar, target: TableEngine, begin: int = PROMPT.size) -> Constraint:
    return Constraints().of(grammar, target.vocabulary, begin)


def made(schema: dict[str, Any]) -> Constraint:
    return Constraints().of(Grammar("json_schema", json.dumps(schema)), table().vocabulary, 0)


# -- masks


@pytest.mark.parametrize("share", [0.001, 0.05, 0.3, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("size", [300, 257, 320])
def test_a_mask_is_applied_alike_however_many_tokens_it_allows(share: float, size: int) -> None:
    draws = np.random.default_rng(int(share * 1000))
    allowed = draws.random(300) < share
    allowed[3] = True
    row = draws.standard_normal(size).astype(np.float32)
    before = row.copy()
    masked = Mask(allowed).applied(row)
    known = row[:300]
    assert np.array_equal(masked, np.where(allowed[: known.size], known, -np.inf))
    assert np.array_equal(row, before), "the engine's row was changed"


def test_masks_depend_on_the_text_alone() -> None:
    """However a matcher was walked before, back and forth and over the end of the answer."""
    target, draws = table(), np.random.default_rng(5)
    walked = constraint(FORCING, target)
    texts = [PROMPT]
    for _ in range(150):
        text = texts[int(draws.integers(len(texts)))]
        fresh = constraint(FORCING, target)
        assert np.array_equal(walked.mask(text).allowed, fresh.mask(text).allowed)
        assert walked.forced(text) == fresh.forced(text)
        choices = [each for each in walked.mask(text).ids.tolist() if each != END]
        if choices:
            texts.append(np.append(text, np.int32(draws.choice(choices))))
        walked._masks.clear()


def test_forced_tokens_end_where_there_is_a_choice_and_with_the_end() -> None:
    target = table()
    found = constraint(Grammar("regex", "abc[de]fab"), target)
    text = target.vocabulary.encode
    assert found.forced(PROMPT) == tuple(text("abc"))
    assert found.forced(np.append(PROMPT, text("abc"))) == ()
    assert found.forced(np.append(PROMPT, text("abcd"))) == (*text("fab"), END)
    assert found.forced(np.append(PROMPT, text("abcdfab"))) == (END,)


@pytest.mark.parametrize(
    ("drafted", "kept"), [("abcda", 4), ("b", 0), ("abcdfab", 7), ("abce", 4), ("abcdf[6]a", 5), ("abcdfab[6]a", 8)]
)
def test_a_chain_is_cut_at_the_first_forbidden_token(drafted: str, kept: int) -> None:
    target = table()
    found = constraint(Grammar("regex", "abc[de]fab"), target)
    ids = [END if letter == "g" else ord(letter) - ord("a") for letter in drafted.replace("[6]", "g")]
    assert found.permitted(Draft.chain(ids), PROMPT).token_ids.tolist() == ids[:kept]


def test_a_row_without_an_allowed_token_is_one_clear_error() -> None:
    target = table()
    sampler = Sampler(Sampling(temperature=0.0, logit_bias={0: -np.inf}), SIZE, constraint=constraint(FORCING, target))
    with pytest.raises(EngineError, match="logit_bias"):
        sampler.distribution(np.zeros(SIZE, np.float32), PROMPT)
    with pytest.raises(EngineError, match="NaN"):
        sampler.distribution(np.full(SIZE, np.nan, np.float32), PROMPT)


# -- the loop


@pytest.mark.parametrize(("rule", "name"), [*itertools.product(("rejection", "block"), ("model", "ngram"))])
def test_the_law_under_a_mask_is_the_masked_targets(rule: str, name: str) -> None:
    """Counts of (place, two tokens before, token) against the table's own rows, masked and normalised."""
    target = table()
    target._table[:, END] = -80.0  # it may come at every even place, and never does
    counts = np.zeros((2, SIZE, SIZE, SIZE))
    accepted = 0
    for seed in range(6):
        sampler = Sampler(replace(PLAIN, seed=seed), SIZE, constraint=constraint(PARITY, target))
        run = Run(CachedSequence(target), PROMPT, sampler, StopRules(target.vocabulary.end_ids, (), 500))
        drafter = ModelDrafter(target.related(sigma=1.0)) if name == "model" else NgramDrafter(min_ngram=1)
        found = list(speculative(run, FixedLength(drafter, 5), RULES[rule]))
        ids = [*PROMPT.tolist(), *(event.token_id for event in found)]
        accepted += run.stats.accepted_tokens
        for place in range(2, len(ids)):
            counts[place % 2, ids[place - 2], ids[place - 1], ids[place]] += 1
    assert accepted > 300, "so few drafts stood that nothing was tested"
    expected, allowed = np.zeros_like(counts), {0: [0, 1, 2], 1: [2, 3, 4, 5]}
    for place, first, second in itertools.product(range(2), range(SIZE), range(SIZE)):
        weights = np.exp(target.row((first, second))[allowed[place]].astype(np.float64))
        expected[place, first, second, allowed[place]] = counts[place, first, second].sum() * weights / weights.sum()
    statistic_counts, statistic_expected, freedom = [], [], 0
    for place, first, second in itertools.product(range(2), range(SIZE), range(SIZE)):
        row = expected[place, first, second, allowed[place]]
        if row.min() >= 5:
            statistic_counts.append(counts[place, first, second, allowed[place]])
            statistic_expected.append(row)
            freedom += len(allowed[place]) - 1
        assert counts[place, first, second].sum() == counts[place, first, second, allowed[place]].sum()
    assert freedom > 20
    score = chi_square_score(np.concatenate(statistic_counts), np.concatenate(statistic_expected), freedom)
    assert score < ALPHA_1E6


# -- what is asked for


def test_only_one_structure_and_nothing_that_contradicts_it() -> None:
    for fields, words in (
        ({"json_schema": "{"}, "not valid JSON"),
        ({"json_schema": "[1]"}, "must be a JSON object"),
        ({"json_schema": {"a": {1, 2}}}, "JSON cannot"),
        ({"regex": ""}, "regex is empty"),
        ({"grammar": 5}, "grammar must be text"),
        ({"grammar": "x" * ((1 << 18) + 1)}, "at most 262144"),
    ):
        with pytest.raises(ConfigError, match=words):
            GenerateOptions(**fields)
    given = {"type": "object"}
    options = GenerateOptions(json_schema=given)
    given["type"] = "array"
    assert options.json_schema == '{"type": "object"}' and options == GenerateOptions(json_schema='{"type": "object"}')


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json_schema", '{"properties": {"a": {"items": {"type": "strin"}}}}', "Invalid type: strin"),
        ("json_schema", '{"$defs": {"x": {"not": {}}}, "$ref": "#/$defs/x"}', "Unimplemented keys"),
        ("json_schema", '{"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(a"}]}', "regex parse error"),
        (
            "json_schema",
            '{"items": {"type": "object", "minProperties": 2}}',
            "at items: minProperties 2 cannot be kept",
        ),
        ("json_schema", '{"$ref": "#/nowhere"}', "Pointer '/nowhere' does not exist"),
        ("json_schema", '{"properties": {"a": {"type": "array", "uniqueItems": true}}}', "uniqueItems"),
        ("grammar", "start: x", "unknown name"),
        ("grammar", 'root ::= "yes" | (', "Expected"),
        ("grammar", "root ::= missing", "Rule 'missing' not found"),
        ("regex", "[a-", "unclosed character class"),
        ("json_schema", '{"properties": {"a": ' * 300 + "{}" + "}}" * 300, "it is nested too deeply"),
    ],
)
def test_a_mistake_is_one_error(kind: Any, source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        Constraints().of(Grammar(kind, source), table().vocabulary, 0)
    assert str(raised.value).startswith(f"{kind} cannot be used: ")


def test_a_grammar_that_is_too_much_for_the_library_in_mid_answer_is_the_callers_mistake() -> None:
    target = table()
    found = constraint(Grammar("grammar", 'root ::= "a"{9999999}'), target)
    sampler = Sampler(Sampling(), SIZE, constraint=found)
    with pytest.raises(ConfigError, match=r"cannot be followed any further.*use a simpler"):
        for end in range(8):
            sampler.forced(np.array([0, 1, *[0] * end], np.int32))


ODD: tuple[dict[str, Any], ...] = ({"required": 5}, {"minProperties": "3"}, {"required": [1, {}], "minProperties": 1.5})


@pytest.mark.parametrize(
    "fields",
    [
        {"minProperties": 1},
        {"properties": {"a": {}}, "required": ["a"], "minProperties": 2},  # which no repeated name can meet
        *({"$defs": {"x": odd}} for odd in ODD),  # nothing uses it
        {"properties": {"a": {"type": "array", "items": {"enum": [1]}, "maxItems": 2, "uniqueItems": False}}},
        {"properties": {"a": {"multipleOf": 9973}, "b": {"multipleOf": 9967}}},  # of different values
        *(
            {"properties": {"a": {"type": "number", "multipleOf": n}}}
            for n in (7, 0.01, 99_999, 3_000_000, 5e6, 2.5e-7)
        ),
    ],
    ids=str,
)
def test_a_schema_that_can_be_kept_is_taken(fields: dict[str, Any]) -> None:
    made({"type": "object"} | fields)


@cache
def vocabulary() -> TokenizerFile:
    return TokenizerFile(DEMO / "onnx" / "target", 4096)


def followed(grammar: Grammar, text: str) -> bool:
    """Whether a text may be written, and may end there."""
    matcher = compiled(grammar, Library(vocabulary()))[0].deep_copy()
    for letter in text:
        ids = vocabulary().encode(letter)
        if matcher.validate_tokens(ids) != len(ids):
            return False
        matcher.consume_tokens(ids)
    return bool(matcher.is_accepting())


ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*"""
NAMES = 'root ::= a-b a_b A-b 2x\na-b ::= "1"\na_b ::= "2"\nA-b ::= "3"\n2x ::= "4"'  # Lark has no such names
INT64 = (-(2**63), 2**63 - 1)
WHOLE: Any = {"type": "integer"}
KEYWORDS = ("enum", "const", "default", "minimum", "format", "multipleOf")  # which a property may be called, too
CALLED = {"type": "object", "properties": {name: WHOLE | {"minimum": INT64[0]} for name in KEYWORDS}}


@pytest.mark.parametrize(
    ("structure", "is_allowed", "is_not"),
    [
        # a class that leaves out a quotation mark has none
        ({"pattern": r"^[^\\/:*?\"<>|]+$"}, ['"a b.txt"'], [r'"a\"b"', r'"a\\b"', '"a/b"']),
        ({"pattern": '^[^"]*$'}, ['"it\'s"'], [r'"say \"a\""']),
        ({"pattern": r"^[^a]+$"}, [r'"b\"c"'], ['"ba"']),
        # a rule of GBNF may end before what it could read too
        (ARITHMETIC, ["1 +2 = 3\n", "1+2=3\n\na=b\n"], ["1+2=3", "1+=3\n"]),
        ('root ::= word "ing"\nword ::= [a-z]+', ["going"], []),
        (NAMES, ["1234"], ["1134"]),
        # characters by their number
        (r'root ::= "caf\u00e9ab"', ["caféab"], ["caf\ue9ab"]),
        (r'root ::= "\u0394elta" "\u0022\u005c\u0009"', ['Δelta"\\\t'], ["\u394elta"]),
        (r'root ::= [\u00e9ab] "x"', ["éx", "ax"], ["\ue9abx"]),
        (r"root ::= [^\u00e9\u0041-\u005a]", ["a"], ["é", "B"]),
        (r'root ::= "\\u00e9"', ["\\u00e9"], ["é"]),
        # a backslash before a slash is a backslash
        (Grammar("regex", r"a\\/b"), ["a\\/b"], ["a/b"]),
        (Grammar("regex", r"a\/b"), ["a/b"], []),
        (Grammar("regex", "a\\\nb"), ["a\nb"], []),
        # large numbers are kept exactly
        (WHOLE | {"minimum": INT64[0], "maximum": INT64[1]}, ["0", "-9223372036854774784"], [str(2**64), "1.5"]),
        (WHOLE | {"minimum": INT64[0] + 1}, ["-5", "123456789012"], [str(-(2**64))]),
        (WHOLE | {"minimum": -1e30, "maximum": 1e300}, ["-5", "5"], []),
        (WHOLE | {"minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**63 - 1024)], ["-1"]),
        (WHOLE | {"minimum": -(2**53), "maximum": 2**53}, [str(2**53), str(-(2**53))], [str(2**53 + 1)]),
        ({"const": 2**53 + 2}, [str(2**53 + 2)], [str(2**53 + 1), str(2**53)]),
        ({"enum": [1, "9007199254740993"]}, ["1", '"9007199254740993"'], ["9007199254740993"]),
        (CALLED, ['{"enum": 5, "const": -5}'], []),
    ],
)
def test_what_a_structure_allows(structure: Any, is_allowed: list[str], is_not: list[str]) -> None:
    """`structure`: a grammar, one of GBNF, or a schema."""
    if isinstance(structure, dict):
        pattern = {"type": "string"} if "pattern" in structure else {}
        structure = Grammar("json_schema", json.dumps(pattern | structure))
    grammar = Grammar("grammar", structure) if isinstance(structure, str) else structure
    assert [text for text in is_allowed if not followed(grammar, text)] == []
    assert [text for text in is_not if followed(grammar, text)] == []


def schema_chain(link: Any, length: int) -> str:
    """JSON of a schema whose definitions refer to each other, one after the other."""
    chain = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return json.dumps({"$defs": chain | {f"d{length}": {"type": "object"}}, "$ref": "#/$defs/d0"})


LINKS: dict[str, Any] = {
    "items": lambda ref: {"type": "array", "items": ref},
    "properties": lambda ref: {"type": "object", "properties": {"n": ref}},
    "anyOf": lambda ref: {"anyOf": [ref, {"type": "null"}]},
    "allOf": lambda ref: {"allOf": [ref, {"type": "object"}]},
    "doubling": lambda ref: {"anyOf": [ref, {"allOf": [ref, {"type": "object"}]}]},
}


@pytest.mark.parametrize("length", [30, 1500, 3900])
@pytest.mark.parametrize("name", LINKS)
def test_a_chain_of_references_is_followed_or_refused(name: str, length: int) -> None:
    """In a thread of 8 MiB and without a limit of time, all of these ended the process or took minutes."""
    text = schema_chain(LINKS[name], length)
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        return
    try:
        Constraints().of(Grammar("json_schema", text), table().vocabulary, 0)
    except ConfigError as exc:
        assert str(exc).startswith("json_schema cannot be used: ") and len(str(exc)) < 1000


@pytest.mark.parametrize(
    ("first", "rule", "last"),
    [
        ("root ::= r0", 'r{} ::= "a" r{}', 'r{} ::= "b"'),
        ("start: r0", 'r{}: "a" r{}', 'r{}: "b"'),
        ("start: T0", 'T{}: "a" T{}', 'T{}: "b"'),
        ("start: r0", "r{}: r{}", 'r{}: "b"'),
    ],
)
def test_a_chain_of_rules_is_followed_or_refused(first: str, rule: str, last: str) -> None:
    def chain(length: int) -> Grammar:
        rules = (rule.format(i, i + 1) for i in range(length))
        return Grammar("grammar", "\n".join((first, *rules, last.format(length))))

    assert followed(chain(3900), "b" if '"a"' not in rule else "a" * 3900 + "b")
    try:
        Constraints().of(chain(30_000), table().vocabulary, 0)
    except ConfigError as exc:
        assert str(exc).startswith("grammar cannot be used: ") and str(exc).endswith("use a simpler one")


ID, OTHER = 1145141919810364365, 10**30 + 1  # neither is a double


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"enum": [7, ID]},
        {"properties": {"a": {"items": {"const": {"b": [OTHER]}}}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"enum": [1e300]}}},
        {"const": -(2**63)},
        {"type": "integer", "minimum": 2**64 - 1, "maximum": 2**64 - 1},
        {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)},
        {"type": "integer", "minimum": -1e30, "maximum": -1e29},
        {"$ref": "#/x/y", "x": {"y": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}}},
    ],
)
def test_a_number_that_cannot_be_kept_is_refused(schema: dict[str, Any]) -> None:
    words = "json_schema cannot be used: .*cannot be kept exactly"
    with pytest.raises(ConfigError, match=words):
        made(schema)
    lark = f"start: %json {json.dumps(schema)}"
    with pytest.raises(ConfigError, match=words.replace("json_schema", "grammar")):
        Constraints().of(Grammar("grammar", lark), table().vocabulary, 0)


@pytest.mark.parametrize("schema", [{"multipleOf": 2**30}, {"allOf": [{"multipleOf": 99_991}, {"multipleOf": 99_989}]}])
def test_divisors_that_take_too_long_end_in_the_child(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="json_schema cannot be used: "):
        made({"type": "integer"} | schema)


@pytest.mark.parametrize("form", ["uri-reference", "password", "int32"])
def test_a_format_that_is_not_known_is_a_note(form: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": form}}}
    found = made(schema)
    assert found.facts.notes == (f"the format {form!r} is not enforced",)
    number = {"type": "integer", "format": form}
    assert not Constraints().of(Grammar("json_schema", json.dumps(number)), table().vocabulary, 0).facts.notes


def test_one_of_that_cannot_be_told_apart_is_a_note() -> None:
    schema = {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]}
    assert "oneOf is taken as anyOf" in made(schema).facts.notes[0]
    apart = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
    assert not Constraints().of(Grammar("json_schema", json.dumps(apart)), table().vocabulary, 0).facts.notes


def test_a_vocabulary_without_an_end_is_refused() -> None:
    with pytest.raises(CapabilityError, match="end-of-text"):
        Constraints().of(FORCING, TableEngine.random(SIZE).vocabulary, 0)

"""Calls that a grammar forces: whatever it allows is read back as a call whose arguments match the tool's schema."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from edgespec.chat.marks import control_text
from edgespec.chat.tool_forms import FORMS, PLAIN_FORMS, Form
from edgespec.chat.tools import ToolParser
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.sampling.constraint.grammar import Grammar, compiled
from edgespec.sampling.constraint.library import Library
from edgespec.server.exchange import compact
from edgespec.server.structure import call_grammar, parameters_of
from edgespec.vocabulary import IncrementalDecoder

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "onnx" / "target"
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
PARAMETERS: dict[str, dict[str, Any]] = {
    "of itself": {
        "properties": {"v": {"type": "boolean"}, "c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
        "required": ["v"],
    },
    "of a property": {
        "properties": {
            "a": {"type": "object", "properties": {"v": SMALL}, "required": ["v"], "additionalProperties": False},
            "default": {"type": "array", "items": {"$ref": "#/properties/a"}, "maxItems": 1},
        },
        "required": ["a", "default"],
    },
    "of definitions": {
        "$defs": {"E": {"enum": ["A", "B"]}},
        "properties": {
            "x": {"$ref": "#/$defs/E"},
            "y": {"type": "array", "items": {"$ref": "#/$defs/E"}, "maxItems": 2},
        },
        "required": ["x"],
    },
    "names": {"properties": {"my key": SMALL, "Größe": {"type": "boolean"}}, "required": ["my key", "Größe"]},
    "no letters": {
        "properties": {"e": {"type": "string", "maxLength": 0}, "t": {"type": "string", "maxLength": 3}},
        "required": ["e", "t"],
    },
    "values": {"properties": {"z": {"enum": [1, "1", None, "None", True]}}, "required": ["z"]},
    "lists": {"properties": {"l": {"type": "array", "items": SMALL, "uniqueItems": False, "maxItems": 2}}},
}


def test_half_a_surrogate_pair_in_an_argument_is_sent_as_an_escape() -> None:
    arguments = {"x": json.loads('"smile \\ud83d"')}
    assert json.loads(compact(arguments)) == arguments and compact(arguments).encode()
    assert compact({"x": "größer"}) == '{"x":"größer"}'


@pytest.fixture(scope="module")
def vocabulary() -> TokenizerFile:
    return TokenizerFile(DEMO, 4096)


def walks(source: str, vocabulary: TokenizerFile, count: int, most: int = 160) -> list[list[int]]:
    """Texts of random tokens that a grammar allows, up to where it may end; those without an end are left out."""
    rng, first, found = Random(1), compiled(Grammar("grammar", source), Library(vocabulary))[0], []
    for _ in range(count):
        matcher, ids = first.deep_copy(), list[int]()
        while len(ids) < most:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: vocabulary.size]).tolist()
            assert allowed, "a dead end"
            if vocabulary.end_ids & set(allowed):
                found.append(ids)
                break
            short = [token for token in allowed if vocabulary.piece(token)[:1] in b'"]}<\n,|)']
            ids.append(rng.choice(short if short and rng.random() < 0.5 else allowed))
            matcher.consume_token(ids[-1])
    return found


@pytest.mark.parametrize("form", [*FORMS, *PLAIN_FORMS], ids=lambda form: form.name)
@pytest.mark.parametrize("case", PARAMETERS)
def test_what_is_forced_is_a_call_that_matches(case: str, form: Form, vocabulary: TokenizerFile) -> None:
    schema = {"type": "object", "additionalProperties": False} | PARAMETERS[case]
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    texts = walks(call_grammar(tools, form, vocabulary, 1, None), vocabulary, 8)
    assert len(texts) > 3
    for ids in texts:
        parser, decoder, calls, rest = ToolParser(form, tools), IncrementalDecoder(vocabulary), [], ""
        for text, more in (
            *(parser.push(control_text(vocabulary, token, parser.marks) + decoder.push(token)) for token in ids),
            parser.push(decoder.finish()),
            parser.finish(),
        ):
            rest, calls = rest + text, calls + more
        (call,) = calls
        assert not rest.strip()
        jsonschema.validate(json.loads(call.arguments), parameters_of(tools[0]))

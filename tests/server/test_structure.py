"""Structured answers and forced calls over HTTP, in every protocol; a bad schema is one clear 400."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from starlette.testclient import TestClient

import serving
from edgespec.chat.marks import control_text
from edgespec.chat.tool_forms import FORMS, PLAIN_FORMS, ToolForm
from edgespec.chat.tools import ToolParser
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.sampling.constraint.grammar import Grammar, compiled
from edgespec.sampling.constraint.library import Library
from edgespec.server import structure
from edgespec.server.answer import compact
from edgespec.server.structure import call_grammar, parameters_of
from edgespec.server.web import NOTES
from edgespec.vocabulary import IncrementalDecoder

CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
QUESTION = [{"role": "user", "content": "I want a table for two in San Jose."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "seats": {"enum": [1, 2, 3]}},
    "required": ["city", "seats"],
    "additionalProperties": False,
}
BAD = {"type": "object", "properties": {"city": {"type": "strin"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "table", "schema": SCHEMA, "strict": True}}
BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "table", "schema": BAD}}


def tool(name: str, parameters: dict[str, Any] = SCHEMA) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("BookTable"), tool("FindTable")]


def post(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    greedy = {"temperature": 0}
    short = {"stream": False, "options": greedy} if path == OLLAMA else {"max_tokens": 120} | greedy
    return serving.post(client, path, {"messages": QUESTION} | short | fields)


def test_a_response_format_is_kept_with_and_without_speculation(client: TestClient):
    texts = set()
    for speculative in (False, {"draft_length": 4}):
        answer = post(client, CHAT, response_format=FORMAT, speculative=speculative)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        texts.add(choice["message"]["content"])
    assert len(texts) == 1
    loose = post(client, CHAT, response_format={"type": "json_object"}, max_tokens=16)["choices"][0]["message"]
    assert loose["content"].startswith("{")


def test_what_of_a_schema_is_not_kept_is_a_note(client: TestClient):
    both = {"oneOf": [{"type": "integer", "minimum": 5, "maximum": 9}, {"type": "integer", "minimum": 7, "maximum": 9}]}
    asked = {"messages": QUESTION, "temperature": 0, "max_tokens": 40}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": both}}
    for is_stream in (False, True):
        answered = client.post(CHAT, json=asked | {"response_format": form, "stream": is_stream})
        assert "oneOf is taken as anyOf" in answered.headers[NOTES]
    secret = {"type": "object", "properties": {"city": {"type": "string", "format": "password", "maxLength": 8}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": secret}}
    answered = client.post(CHAT, json=asked | {"response_format": form})
    assert answered.headers[NOTES] == "the format 'password' is not enforced"


def test_an_id_of_64_bits_is_never_another_one(client: TestClient):
    user = {"enum": [1145141919810364365]}
    ban = {"type": "object", "properties": {"user": user}, "required": ["user"], "additionalProperties": False}
    fields: dict[str, Any] = {"messages": QUESTION, "tools": [tool("ban", ban)], "tool_choice": "required"}
    answered = client.post(CHAT, json=fields)
    assert answered.status_code == 400
    words = (
        "tools.0.function.parameters cannot be used: at properties.user: the value 1145141919810364365 cannot be kept"
    )
    assert words in answered.json()["error"]["message"]


def test_llama_cpps_fields_work_in_chats_and_completions(client: TestClient):
    for fields in ({"json_schema": SCHEMA}, {"response_format": FORMAT}):
        completed = client.post("/v1/completions", json={"prompt": "A table:", "max_tokens": 120} | fields).json()
        jsonschema.validate(json.loads(completed["choices"][0]["text"]), SCHEMA)
    for grammar in ('root ::= "yes" | "no"', 'start: "yes" | "no"'):
        assert post(client, CHAT, grammar=grammar)["choices"][0]["message"]["content"] in ("yes", "no")
    assert post(client, CHAT, regex="[0-9]{3}")["choices"][0]["message"]["content"].isdecimal()


def test_ollamas_format(client: TestClient):
    jsonschema.validate(json.loads(post(client, OLLAMA, format=SCHEMA)["message"]["content"]), SCHEMA)
    answered = post(client, OLLAMA, format="json", options={"temperature": 0, "num_predict": 8})
    assert answered["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"BookTable", "FindTable"}),
        ({"type": "function", "function": {"name": "FindTable"}}, {"FindTable"}),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_forced_call_is_a_call_of_the_tools(client: TestClient, choice: Any, names: set[str], parallel: bool):
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 300}
    fields["messages"] = [{"role": "user", "content": "Tell me a story."}]
    (found,) = post(client, CHAT, **fields)["choices"]
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
    calls = found["message"]["tool_calls"]
    assert 1 <= len(calls) <= (structure.MOST_CALLS if parallel else 1)
    for call in calls:
        assert call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_the_limit_within_a_later_call_is_no_end_of_the_calls(client: TestClient):
    tools = [tool("find", {"type": "object", "properties": {}})]
    fields = {"tools": tools, "tool_choice": "required", "messages": [{"role": "user", "content": "?"}]}
    both = post(client, CHAT, **fields)
    assert both["choices"][0]["finish_reason"] == "tool_calls" and len(both["choices"][0]["message"]["tool_calls"]) > 1
    most = both["usage"]["completion_tokens"] - 6
    (cut,) = post(client, CHAT, **fields, max_tokens=most)["choices"]
    assert cut["finish_reason"] == "length" and cut["message"]["tool_calls"]
    asked = {"input": "?", "tools": [{"type": "function", **tools[0]["function"]}], "tool_choice": "required"}
    answered = client.post("/v1/responses", json=asked | {"temperature": 0, "max_output_tokens": most})
    assert answered.json()["status"] == "incomplete"


@pytest.mark.parametrize("required", [[], ["size"]])
def test_a_forced_call_has_the_listed_arguments_only(client: TestClient, required: list[str]):
    """Also where the schema would allow others, which a small model would invent until its tokens are used up."""
    schema = {"type": "object", "properties": {"size": {"enum": ["big", "small"]}}, "required": required}
    fields = {"tools": [tool("order", schema)], "tool_choice": "required", "messages": QUESTION}
    (found,) = post(client, CHAT, **fields, max_tokens=200)["choices"]
    assert found["finish_reason"] == "tool_calls"
    for call in found["message"]["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert set(required) <= set(arguments) <= {"size"}
    for strange in (3, [["size"]], ["other"]):
        fields["tools"] = [tool("order", schema | {"required": strange})]
        assert client.post(CHAT, json=fields | {"max_tokens": 30}).status_code in (200, 400)


def test_anthropics_tool_choice(client: TestClient):
    tools = [{"name": "FindTable", "input_schema": SCHEMA}, {"name": "BookTable", "input_schema": SCHEMA}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "BookTable", "disable_parallel_tool_use": True}):
        answer = post(client, MESSAGES, tools=tools, tool_choice=choice, max_tokens=300)
        assert answer["stop_reason"] == "tool_use"
        block = answer["content"][-1]
        assert block["name"] == choice.get("name", block["name"])
        jsonschema.validate(block["input"], SCHEMA)


def test_tools_and_a_schema_answer_with_one_of_both(client: TestClient):
    found = post(client, CHAT, tools=TOOLS, response_format=FORMAT, max_tokens=300)["choices"][0]["message"]
    answer = json.loads(found["content"]) if found["content"] else None
    for value in [answer] if answer else [json.loads(call["function"]["arguments"]) for call in found["tool_calls"]]:
        jsonschema.validate(value, SCHEMA)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": BAD_FORMAT}, "response_format.json_schema.schema", "Invalid type: strin"),
        ({"json_schema": BAD}, "json_schema", "Invalid type: strin"),
        ({"response_format": FORMAT, "json_schema": SCHEMA}, "response_format", "give one"),
        ({"response_format": FORMAT | {"json_schema": {}}}, "response_format.json_schema.schema", "is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"grammar": "start: x"}, "grammar", "unknown name"),
        ({"grammar": "start: x", "regex": "a"}, "grammar", "one structure"),
        ({"free_until": "</think>"}, "free_until", "needs json_schema"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "auto, none, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "among"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}, "tool_choice", "keep one"),
        ({"tools": [tool("f", BAD)], "tool_choice": "required"}, "tools.0.function.parameters", "Invalid type"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_400_that_names_the_field(client: TestClient, fields: dict[str, Any], param: str, words: str):
    answered = client.post(CHAT, json={"messages": QUESTION} | fields)
    error = answered.json()["error"]
    assert answered.status_code == 400, error
    assert error["param"] == param and words in error["message"]
    if "grammar" in fields:
        completed = client.post("/v1/completions", json={"prompt": "x"} | fields)
        assert completed.status_code == 400 and completed.json()["error"] == error


def test_without_the_library_the_server_says_what_to_install(client: TestClient, service: Any, monkeypatch: Any):
    from edgespec.sampling.constraint import library
    from edgespec.sampling.constraint.state import Constraints

    monkeypatch.setattr(service.require().model, "_constraints", Constraints())
    monkeypatch.setattr(library, "is_importable", lambda name: False)
    answered = client.post(CHAT, json={"messages": QUESTION, "response_format": FORMAT})
    assert answered.status_code == 501 and "needs llguidance" in answered.json()["error"]["message"]


# -- Calls that a grammar forces: whatever it allows is read back as a call whose arguments match the tool's schema


DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "onnx" / "target"
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
PARAMETERS: dict[str, dict[str, Any]] = {
    "of itself": {
        "properties": {"v": {"type": "boolean"}, "c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
        "required": ["v"],
    },
    "names": {"properties": {"my key": SMALL, "Größe": {"type": "boolean"}}, "required": ["my key", "Größe"]},
    "values": {"properties": {"z": {"enum": [1, "1", None, "None", True, "very <b>small</b>", "/a/"]}}},
    "optional": {
        "properties": {
            "city": {"type": "string", "minLength": 2, "maxLength": 8},
            "nick": {"type": ["string", "null"], "maxLength": 5},
            "guest": {"type": "object", "properties": {"age": SMALL}, "additionalProperties": False},
        }
    },
    "others": {"additionalProperties": {"enum": ["x", 2]}, "maxProperties": 2},
    "none": {"properties": {}},
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
def test_what_is_forced_is_a_call_that_matches(case: str, form: ToolForm, vocabulary: TokenizerFile) -> None:
    """Whatever the model of a format would write under the grammar."""
    schema = {"type": "object", "additionalProperties": False} | PARAMETERS[case]
    tools, most = [tool("f", schema), tool("g", schema)], 2 if form.takes_several else 1
    texts = walks(call_grammar(tools, form, vocabulary, most, None), vocabulary, 6, 400)
    assert len(texts) > 2
    for ids in texts:
        parser, decoder, calls, rest = ToolParser(form, tools), IncrementalDecoder(vocabulary), [], ""
        for text, more in (
            *(parser.push(control_text(vocabulary, token, parser.form.marks) + decoder.push(token)) for token in ids),
            parser.push(decoder.finish()),
            parser.finish(),
        ):
            rest, calls = rest + text, calls + more
        assert 1 <= len(calls) <= most and {call.name for call in calls} <= {"f", "g"} and not rest.strip()
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), parameters_of(tools[0]))

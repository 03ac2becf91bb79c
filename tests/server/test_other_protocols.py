"""Anthropic's /v1/messages, OpenAI's /v1/responses and the part of Ollama's API: the same answers in other forms."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from starlette.testclient import TestClient

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.chat.messages import checked_messages
from edgespec.server.chat import placed
from edgespec.server.http_errors import HttpError
from edgespec.server.ollama import read_keep_alive
from edgespec.server.web import NOTES
from serving import post, streamed

QUESTION = [{"role": "user", "content": "I want a table for two in San Jose."}]
WEATHER = [{"role": "user", "content": "What is the weather in San Jose on March 5th?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "date": {"type": "string"}}}
ARGUMENTS = {"city": "San Jose", "date": "2019-03-05"}
SYSTEM = [{"type": "text", "text": "You book "}, {"type": "text", "text": "tables."}]


@pytest.fixture
def expected(model: Model, greedy: Sampling, plain: GenerateOptions) -> Any:
    messages = [{"role": "system", "content": "You book tables."}, *QUESTION]
    return model.chat(messages, greedy, plain).result()


# -- Anthropic


def test_a_message(client: TestClient, expected: Any):
    fields = {"system": SYSTEM, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    answer = post(client, "/v1/messages", **fields)
    assert answer["content"] == [{"type": "text", "text": expected.text}]
    assert (answer["type"], answer["role"], answer["stop_sequence"]) == ("message", "assistant", None)
    assert answer["stop_reason"] == {"stop": "end_turn", "length": "max_tokens"}[expected.finish_reason]
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(expected.prompt_token_ids)
    assert usage["output_tokens"] == len(expected.token_ids)
    counted = post(client, "/v1/messages/count_tokens", system=SYSTEM, messages=QUESTION)
    assert counted == {"input_tokens": len(expected.prompt_token_ids)}


def test_a_streamed_message(client: TestClient, expected: Any):
    kinds = streamed(client, "/v1/messages", system=SYSTEM, messages=QUESTION, max_tokens=24, temperature=0)
    assert [event["type"] for event in kinds[:2]] == ["message_start", "content_block_start"]
    assert [event["type"] for event in kinds[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds[0]["message"]["content"] == [] and kinds[0]["message"]["stop_reason"] is None
    assert "".join(event["delta"]["text"] for event in kinds[2:-3]) == expected.text
    assert kinds[-2]["usage"]["output_tokens"] == len(expected.token_ids)


def test_a_tool_is_used_and_its_result_answered(client: TestClient):
    tools = [{"name": "GetWeather", "description": "Weather", "input_schema": SCHEMA}]
    fields = {"tools": tools, "max_tokens": 200, "temperature": 0}
    answer = post(client, "/v1/messages", messages=WEATHER, **fields)
    (block,) = answer["content"]
    assert block["type"] == "tool_use" and block["name"] == "GetWeather" and block["input"] == ARGUMENTS
    assert answer["stop_reason"] == "tool_use"
    start, delta, stop = [
        event for event in streamed(client, "/v1/messages", fields, messages=WEATHER) if "index" in event
    ]
    assert start["content_block"]["input"] == {} and start["content_block"]["name"] == "GetWeather"
    assert json.loads(delta["delta"]["partial_json"]) == ARGUMENTS and stop["type"] == "content_block_stop"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": '{"t": "70"}'}]}
    turns = [*WEATHER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    assert post(client, "/v1/messages", messages=turns, **fields)["content"][0]["text"].strip()


def test_an_answer_in_a_schema(client: TestClient):
    schema = {"type": "object", "properties": {"n": {"enum": [2, 4]}}, "required": ["n"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    found = post(client, "/v1/messages", messages=QUESTION, max_tokens=30, output_config=config)
    assert json.loads(found["content"][0]["text"])["n"] in (2, 4)


# -- Ollama


def test_a_chat_streams_lines_unless_told_otherwise(client: TestClient, expected: Any):
    messages = [{"role": "system", "content": "You book tables."}, *QUESTION]
    options = {"temperature": 0, "num_predict": 24, "num_ctx": 1024}
    answered = client.post("/api/chat", json={"model": "demo:latest", "messages": messages, "options": options})
    assert answered.headers["content-type"].startswith("application/x-ndjson")
    *parts, last = [json.loads(line) for line in answered.text.splitlines()]
    assert "".join(part["message"]["content"] for part in parts) == expected.text
    assert [part["done"] for part in (*parts, last)] == [False] * len(parts) + [True]
    assert (last["prompt_eval_count"], last["eval_count"]) == (len(expected.prompt_token_ids), len(expected.token_ids))
    whole = post(client, "/api/chat", messages=messages, options=options, stream=False, keep_alive="5m")
    assert whole["message"] == {"role": "assistant", "content": expected.text} and whole["done"]


def test_lines_hold_no_other_line_ends(client: TestClient):
    """httpx's `iter_lines`, with which Ollama's client reads, ends a line at these, too."""
    text = "a\u2028b\u2029c\u0085"
    answered = client.post("/api/chat", json={"messages": QUESTION, "format": {"enum": [text]}})
    parts = [json.loads(line)["message"]["content"] for line in answered.text.splitlines()]
    assert json.loads("".join(parts)) == text


def test_generate_uses_the_template_unless_raw(client: TestClient, model: Model, greedy, plain, expected: Any):
    fields = {"stream": False, "options": {"temperature": 0, "num_predict": 24}}
    prompt = QUESTION[0]["content"]
    templated = post(client, "/api/generate", prompt=prompt, system="You book tables.", **fields)
    assert templated["response"] == expected.text
    raw = post(client, "/api/generate", prompt=prompt, raw=True, **fields)
    assert raw["response"] == model.generate(prompt, greedy, plain).text


def test_a_tool_call_of_ollama_has_its_arguments_as_an_object(client: TestClient):
    tools = [{"type": "function", "function": {"name": "GetWeather", "parameters": SCHEMA}}]
    options = {"temperature": 0, "num_predict": 200}
    answer = post(client, "/api/chat", messages=WEATHER, tools=tools, options=options, stream=False)
    assert answer["message"]["tool_calls"] == [{"function": {"name": "GetWeather", "arguments": ARGUMENTS}}]
    result = {"role": "tool", "content": '{"t": "70"}', "tool_name": "GetWeather"}
    turns = [*WEATHER, answer["message"], result]
    assert post(client, "/api/chat", messages=turns, tools=tools, options=options, stream=False)["message"]["content"]


def test_the_model_is_listed_and_shown(client: TestClient, model: Model):
    version = client.get("/api/version").json()
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4)  # as VS Code demands
    assert version["edgespec"] == edgespec.__version__
    (listed,) = client.get("/api/tags").json()["models"]
    (running,) = client.get("/api/ps").json()["models"]
    assert listed["model"] == "demo" and listed["size"] == model.target.facts.weight_bytes
    assert listed["digest"] == model.pair.files["target"].sha256 == running["digest"]
    details = {"family": "llama", "families": ["llama"], "parameter_size": "8.13M", "quantization_level": "Q8_0"}
    assert listed["details"] == running["details"] == {"parent_model": "", "format": "gguf"} | details
    assert running["context_length"] == model.context_length
    shown = post(client, "/api/show")
    assert shown["details"] == listed["details"] and shown["capabilities"] == ["completion", "tools"]
    info = shown["model_info"]
    assert (info["general.architecture"], info["llama.context_length"]) == ("llama", model.context_length)
    assert (info["general.parameter_count"], info["llama.block_count"]) == (8131328, 9)
    assert client.post("/api/show", json={"name": "demo:latest"}).json() == shown
    assert client.post("/api/show", json={"name": "other"}).json() == shown


@pytest.mark.parametrize("fields", [{"messages": QUESTION}, {"prompt": "hi"}, {"prompt": "hi", "raw": True}])
def test_a_larger_context_than_the_servers_is_no_error_while_all_fits(client: TestClient, fields: dict[str, Any]):
    """Many clients send 8192 with every request."""
    path = "/api/chat" if "messages" in fields else "/api/generate"
    for options in ({"num_predict": 4}, {"num_predict": 4, "num_ctx": 2048}):
        answered = client.post(path, json={"model": "demo", "stream": False, "options": options} | fields)
        assert answered.status_code == 200 and NOTES not in answered.headers
    options = {"num_ctx": 8192.0, "num_predict": 4.0}  # as clients write them that have one type for numbers
    answered = client.post(path, json={"model": "demo", "stream": False, "options": options, "keep_alive": -1} | fields)
    assert answered.status_code == 200 and answered.json()["done"], answered.text
    assert answered.headers[NOTES] == "options.num_ctx: the context has 2048 tokens, the server's --ctx-size"


# -- Requests to /v1/messages as Claude Code sends them: what is meant for Anthropic's servers does not stop an
# answer


PATH = "/v1/messages?beta=true"
CACHED = {"cache_control": {"type": "ephemeral"}}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}
BASH = {
    "name": "Bash",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
ASKED = [
    {"type": "text", "text": "<system-reminder>\nThe date is today's.\n</system-reminder>"},
    {"type": "text", "text": "I want a table for two in San Jose.", **CACHED},
]
REQUEST: dict[str, Any] = {
    "model": "claude-opus-4-6",
    "messages": [{"role": "user", "content": ASKED}],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.30.a1b; cc_entrypoint=cli; cch=00000;"},
        {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **CACHED},
    ],
    "tools": [BASH | CACHED, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "metadata": {"user_id": "user_0_account__session_0"},
    "max_tokens": 32000,
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}


def test_a_turn_of_claude_code(client: TestClient):
    events = streamed(client, PATH, REQUEST)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert events[0]["message"]["model"] == "demo"
    notes = client.post(PATH, json=REQUEST, headers=HEADERS).headers[NOTES]
    noted = [note.partition(":")[0] for note in notes.split("; ")]
    assert sorted(noted) == ["context_management", "model", "thinking", "tools"]
    assert "web_search_20250305 is left out" in notes


def test_tokens_are_counted_for_the_same_fields_without_the_line_for_billing(client: TestClient):
    """It has another number in each request: nothing behind it could be taken from the cache."""
    counted = {name: REQUEST[name] for name in ("model", "messages", "system", "tools", "thinking")}
    path = "/v1/messages/count_tokens?beta=true"
    found = client.post(path, json=counted, headers=HEADERS).json()["input_tokens"]
    assert post(client, path, counted | {"system": REQUEST["system"][1:]})["input_tokens"] == found
    usage = client.post(PATH, json=REQUEST | {"stream": False, "max_tokens": 1}).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == found


ONE_SYSTEM = """{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set messages = messages[1:] %}
{% endif %}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{{ message.role }}: {{ message.content }}
{% endfor %}"""
SILENT = """{% for message in messages %}{% if loop.first or message.role != 'system' %}{{ message.role }}:
{{ message.content }}{% endif %}{% endfor %}"""
ANY = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"


def roles(template: str, *given: tuple[str, str]) -> list[tuple[str, str]]:
    messages = [{"role": role, "content": content} for role, content in given]
    notes: list[str] = []
    found = [(each["role"], each["content"]) for each in placed(template, checked_messages(messages), notes)]
    assert bool(notes) == ("system" in [role for role, _ in given[2:]] and template != ANY)
    return found


@pytest.mark.parametrize("template", [ONE_SYSTEM, SILENT], ids=["refuses", "leaves out"])
def test_system_messages_where_a_template_shows_one_only(template: str):
    leading = (("system", "A"), ("system", "B"), ("user", "C"))
    middle = (("system", "A"), ("user", "B"), ("assistant", "C"), ("system", "D"), ("user", "E"), ("assistant", "F"))
    last = (("user", "B"), ("assistant", "C"), ("user", "D"), ("system", "E"))
    for given in (leading, middle, last):
        assert roles(ANY, *given) == list(given)
    assert roles(template, *leading) == [("system", "A\n\nB"), ("user", "C")]
    assert roles(template, *middle) == [*middle[:3], ("user", "D\n\nE"), middle[5]]
    assert roles(template, *last) == [*last[:2], ("user", "D\n\nE")]


# -- How Ollama's `keep_alive` is written; what it does is in test_idle_unload


def test_a_keep_alive_is_read_as_ollama_does():
    given = {None: None, 0: 0, 0.5: 0.5, "1.5h": 5400, -1: math.inf, "-1m": math.inf}
    assert {value: read_keep_alive(value) for value in given} == given
    for wrong in ("", "5x", "m", True, [], "1h30m", 10**400):
        with pytest.raises(HttpError, match="keep_alive must be seconds or a duration") as caught:
            read_keep_alive(wrong)
        assert caught.value.status == 400


# -- /v1/responses: as chats, in the shapes of OpenAI's newer protocol


RESPONSES = "/v1/responses"
SHORT = {"model": "demo", "temperature": 0, "max_output_tokens": 24}
TEXT, WEATHER_TEXT = QUESTION[0]["content"], WEATHER[0]["content"]
TOOL = {"type": "function", "name": "GetWeather", "parameters": SCHEMA}


@pytest.mark.parametrize(
    "asked",
    [TEXT, *([{"role": "user", "content": each}] for each in (TEXT, [{"type": "input_text", "text": TEXT}]))],
    ids=["text", "message", "parts"],
)
def test_the_text_is_that_of_the_model(client: TestClient, expected: Any, asked: Any):
    answer = post(client, RESPONSES, SHORT, input=asked, instructions="You book tables.")
    (item,) = answer["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    (part,) = item["content"]
    assert part == {"type": "output_text", "text": expected.text, "annotations": [], "logprobs": []}
    status = {"stop": "completed", "length": "incomplete"}[expected.finish_reason]
    assert answer["status"] == item["status"] == status
    usage = answer["usage"]
    assert usage["input_tokens"] == len(expected.prompt_token_ids)
    assert usage["output_tokens"] == len(expected.token_ids)


def test_a_stream_holds_the_same_answer(client: TestClient, expected: Any):
    found = streamed(client, RESPONSES, SHORT, input=TEXT, instructions="You book tables.")
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert found[2]["item"]["content"] == [] and found[3]["part"]["text"] == ""  # what is added grows from nothing
    assert kinds[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]
    assert "".join(event["delta"] for event in found if "delta" in event) == expected.text
    last = found[-1]["response"]
    assert last["output"] == [found[-2]["item"]] and last["output"][0]["content"][0]["text"] == expected.text
    assert found[0]["response"]["output"] == [] and found[0]["response"]["usage"] is None


def test_a_call_and_its_result(client: TestClient):
    asked = SHORT | {"input": WEATHER_TEXT, "tools": [TOOL], "max_output_tokens": 64}
    whole = post(client, RESPONSES, asked)
    (call,) = whole["output"]
    assert (call["type"], call["name"]) == ("function_call", "GetWeather")
    assert json.loads(call["arguments"])["city"] == "San Jose"
    found = streamed(client, RESPONSES, asked)
    (again,) = found[-1]["response"]["output"]
    same = ("type", "name", "arguments", "status")
    assert [again[name] for name in same] == [call[name] for name in same]
    assert [event["type"] for event in found if "arguments" in event["type"]] == [
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"temp": 15}'}
    (question,) = WEATHER
    function = {"name": "GetWeather", "arguments": call["arguments"]}
    called = [{"id": call["call_id"], "type": "function", "function": function}]
    messages = [question, {"role": "assistant", "content": "", "tool_calls": called}]
    messages.append({"role": "tool", "tool_call_id": call["call_id"], "content": '{"temp": 15}'})
    tools = [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    translated = post(client, "/v1/chat/completions", temperature=0, max_tokens=24, tools=tools, messages=messages)
    answer = post(client, RESPONSES, SHORT, input=[question, call, result], tools=[TOOL])
    assert answer["usage"]["input_tokens"] == translated["usage"]["prompt_tokens"]
    assert answer["output"][0]["content"][0]["text"] == translated["choices"][0]["message"]["content"]


# -- Requests to /v1/responses as Codex sends them: what is meant for OpenAI's servers does not stop an answer


SHELL = {
    "type": "function",
    "name": "exec_command",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


CODEX: dict[str, Any] = {
    "instructions": "You are a coding agent running in the Codex CLI.",
    "input": [said("developer", "<permissions instructions>"), said("user", "I want a table for two in San Jose.")],
    "tools": [SHELL, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False, "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199-a",
    "text": {"verbosity": "low"}, "client_metadata": {"x-codex-installation-id": "0"}, "truncation": "auto",
    "service_tier": "priority", "safety_identifier": "me", "max_output_tokens": 8,
}  # fmt: skip


def test_a_turn_of_codex(client: TestClient):
    found = streamed(client, RESPONSES, CODEX)
    assert found[0]["type"] == "response.created" and found[-1]["type"] in ("response.completed", "response.incomplete")
    notes = client.post(RESPONSES, json=CODEX, headers={"originator": "codex_cli_rs"}).headers[NOTES]
    noted = [note.partition(":")[0] for note in notes.split("; ")]
    assert sorted(noted) == ["reasoning.effort", "text.verbosity", "tools", "truncation"]
    assert found[-1]["response"]["truncation"] == "disabled" and found[-1]["response"]["reasoning"]["effort"] is None

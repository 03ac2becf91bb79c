"""/v1/responses answers as /v1/chat/completions does, in the shapes of OpenAI's newer protocol; and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec import GenerateOptions, Model, Sampling
from edgespec.server.web import NOTES
from serving import post, streamed

PATH = "/v1/responses"
SHORT = {"model": "demo", "temperature": 0, "max_output_tokens": 24}
QUESTION = "I want a table for two in San Jose."
WEATHER = "What is the weather in San Jose on March 5th?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "date": {"type": "string"}}}
TOOL = {"type": "function", "name": "GetWeather", "parameters": PARAMETERS}


@pytest.fixture
def expected(model: Model, greedy: Sampling, plain: GenerateOptions) -> Any:
    messages = [{"role": "system", "content": "You book tables."}, {"role": "user", "content": QUESTION}]
    return model.chat(messages, greedy, plain).result()


@pytest.mark.parametrize(
    "asked",
    [
        QUESTION,
        *([{"role": "user", "content": each}] for each in (QUESTION, [{"type": "input_text", "text": QUESTION}])),
    ],
    ids=["text", "message", "parts"],
)
def test_the_text_is_that_of_the_model(client: TestClient, expected: Any, asked: Any):
    answer = post(client, PATH, SHORT, input=asked, instructions="You book tables.")
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
    found = streamed(client, PATH, SHORT, input=QUESTION, instructions="You book tables.")
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
    asked = SHORT | {"input": WEATHER, "tools": [TOOL], "max_output_tokens": 64}
    whole = post(client, PATH, asked)
    (call,) = whole["output"]
    assert (call["type"], call["name"]) == ("function_call", "GetWeather")
    assert json.loads(call["arguments"])["city"] == "San Jose"
    found = streamed(client, PATH, asked)
    (again,) = found[-1]["response"]["output"]
    same = ("type", "name", "arguments", "status")
    assert [again[name] for name in same] == [call[name] for name in same]
    assert [event["type"] for event in found if "arguments" in event["type"]] == [
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"temp": 15}'}
    question = {"role": "user", "content": WEATHER}
    function = {"name": "GetWeather", "arguments": call["arguments"]}
    called = [{"id": call["call_id"], "type": "function", "function": function}]
    messages = [question, {"role": "assistant", "content": "", "tool_calls": called}]
    messages.append({"role": "tool", "tool_call_id": call["call_id"], "content": '{"temp": 15}'})
    tools = [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    translated = post(client, "/v1/chat/completions", temperature=0, max_tokens=24, tools=tools, messages=messages)
    answer = post(client, PATH, SHORT, input=[question, call, result], tools=[TOOL])
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


REQUEST: dict[str, Any] = {
    "instructions": "You are a coding agent running in the Codex CLI.",
    "input": [said("developer", "<permissions instructions>"), said("user", "I want a table for two in San Jose.")],
    "tools": [SHELL, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False, "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199-a",
    "text": {"verbosity": "low"}, "client_metadata": {"x-codex-installation-id": "0"}, "truncation": "auto",
    "service_tier": "priority", "safety_identifier": "me", "max_output_tokens": 8,
}  # fmt: skip


def test_a_turn_of_the_agent(client: TestClient):
    found = streamed(client, PATH, REQUEST)
    assert found[0]["type"] == "response.created" and found[-1]["type"] in ("response.completed", "response.incomplete")
    notes = client.post(PATH, json=REQUEST, headers={"originator": "codex_cli_rs"}).headers[NOTES]
    noted = [note.partition(":")[0] for note in notes.split("; ")]
    assert sorted(noted) == ["reasoning.effort", "text.verbosity", "tools", "truncation"]
    assert found[-1]["response"]["truncation"] == "disabled" and found[-1]["response"]["reasoning"]["effort"] is None

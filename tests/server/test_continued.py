"""Conversations that end with an assistant's message, in every chat protocol: the answer goes on from its text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec import GenerateOptions, Model, Sampling

QUESTION = [{"role": "user", "content": "I want a table for two in San Jose."}]
BEGUN = [*QUESTION, {"role": "assistant", "content": "Sure. What "}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def expected(model: Model, greedy: Sampling, plain: GenerateOptions) -> Any:
    return model.chat(BEGUN, greedy, plain).result()


def post(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    answered = client.post(path, json={"model": "demo"} | fields)
    assert answered.status_code == 200, answered.text
    return answered.json()


def test_every_protocol_goes_on_with_the_last_message(client: TestClient, expected: Any) -> None:
    assert expected.text and not expected.text.startswith("Sure")
    chat = post(client, "/v1/chat/completions", messages=BEGUN, max_tokens=24, temperature=0)
    assert chat["choices"][0]["message"]["content"] == expected.text
    assert chat["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    message = post(client, "/v1/messages", messages=BEGUN, max_tokens=24, temperature=0)
    assert message["content"] == [{"type": "text", "text": expected.text}]
    options = {"temperature": 0, "num_predict": 24}
    ollama = client.post("/api/chat", json={"model": "demo", "messages": BEGUN, "stream": False, "options": options})
    assert ollama.json()["message"]["content"] == expected.text
    response = post(client, "/v1/responses", input=BEGUN, max_output_tokens=24, temperature=0)
    assert response["output"][0]["content"][0]["text"] == expected.text


def test_a_streamed_answer_holds_the_new_text_only(client: TestClient, expected: Any) -> None:
    body = {"messages": BEGUN, "max_tokens": 24, "temperature": 0, "stream": True}
    lines = client.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected.text


def test_the_begun_text_counts_as_prompt(client: TestClient, expected: Any) -> None:
    counted = post(client, "/v1/messages/count_tokens", messages=BEGUN)
    assert counted == {"input_tokens": len(expected.prompt_token_ids)}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"grammar": 'start: "a"'},
        {"tools": [TOOL], "tool_choice": "required"},
    ],
)
def test_what_cannot_hold_for_both_parts_is_refused(client: TestClient, fields: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    answered = client.post("/v1/chat/completions", json={"messages": BEGUN, "max_tokens": 4} | fields)
    assert answered.status_code == 400
    assert "Leave out that message" in answered.json()["error"]["message"]


def test_calls_may_follow_a_begun_text(client: TestClient) -> None:
    chat = post(client, "/v1/chat/completions", messages=BEGUN, max_tokens=4, tools=[TOOL])
    assert chat["choices"][0]["message"]["role"] == "assistant"

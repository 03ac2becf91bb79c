"""Errors name fields as the client sent them, also where its protocol is translated into another one."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

MESSAGES = [{"role": "user", "content": "Hi"}]
REPLY = "/v1/responses"
ANTHROPIC = {"messages": MESSAGES, "max_tokens": 4}
BAD = {"type": "string", "pattern": "("}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (REPLY, {"input": "x", "max_output_tokens": -3}, "max_output_tokens"),
        (REPLY, {"input": "x", "text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        (REPLY, {"input": "x", "text": {"format": {"type": "json_schema", "schema": BAD}}}, "text.format.schema"),
        ("/v1/messages", ANTHROPIC | {"stop_sequences": [""]}, "stop_sequences"),
        ("/api/chat", {"messages": MESSAGES, "options": {"top_p": 7}}, "options.top_p"),
        ("/api/chat", {"messages": MESSAGES, "options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ("/api/chat", {"messages": MESSAGES, "format": BAD}, "format"),
        ("/v1/completions", {"prompt": "x", "repeat_last_n": "1"}, "repeat_last_n"),
    ],
)
def test_errors_name_what_was_sent(client: TestClient, path: str, body: dict[str, Any], name: str):
    answered = client.post(path, json={"model": "demo"} | body)
    error = answered.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert answered.status_code == 400 and message.startswith(f"{name} "), answered.text
    assert isinstance(error, str) or error.get("param", name) == name


def test_the_whole_context_may_be_penalised(client: TestClient):
    body = {"prompt": "x", "max_tokens": 1, "repeat_last_n": -1, "repeat_penalty": 1.1}
    assert client.post("/v1/completions", json=body).status_code == 200

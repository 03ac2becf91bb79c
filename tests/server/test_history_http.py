"""Conversations that hold what a text model cannot read, or what a model wrote wrongly, go on in every protocol."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec.server.web import NOTES

BROKEN = '{"a": 2, "b'
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def chat(**result: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": BROKEN}}
    return {"max_tokens": 1, "messages": [
        {"role": "user", "content": "Add."}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", **result}]}  # fmt: skip


def claude(content: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": content}]}]}  # fmt: skip


def response(*items: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": BROKEN}
    return {"max_output_tokens": 1, "input": [{"role": "user", "content": "Add."}, call, *items]}


def llama(message: dict[str, Any]) -> dict[str, Any]:
    looked = [{"role": "user", "content": "Look.", "images": ["AAAA"]}, {"role": "assistant", "content": "A cat."}]
    return {"options": {"num_predict": 1}, "stream": False, "messages": [*looked, message]}


@pytest.mark.parametrize(
    ("path", "body", "noted"),
    [
        ("/v1/chat/completions", chat(content=None), ""),
        ("/v1/chat/completions", chat(), ""),
        ("/v1/chat/completions", chat(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "image_url"),
        ("/v1/messages", claude(None), ""),
        ("/v1/messages", claude([{"type": "text", "text": "a"}, IMAGE]), "image"),
        ("/v1/messages", claude([{"type": "document", "source": {"type": "base64", "data": "AAAA"}}]), "document"),
        ("/v1/responses", response({"type": "function_call_output", "call_id": "c", "output": None}), ""),
        ("/v1/responses", response({"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_image"}]}), "input_image"),
        ("/v1/responses", response({"type": "web_search_call", "id": "w", "action": {"query": "x"}}), ""),
        ("/v1/responses", response({"type": "message", "role": "assistant", "content": [
            {"type": "refusal", "refusal": "No."}]}, {"role": "user", "content": "Why?"}), ""),
        ("/api/chat", llama({"role": "user", "content": "Why?"}), "image"),
        ("/api/chat", llama({"role": "tool", "content": "x", "images": ["AAAA"]}), "image"),
    ],
)  # fmt: skip
def test_it_goes_on(client: TestClient, path: str, body: dict[str, Any], noted: str) -> None:
    answered = client.post(path, json=body)
    assert answered.status_code == 200, answered.text
    assert (f"{noted} left out" in answered.headers.get(NOTES, "")) == bool(noted)


def test_the_model_sees_what_was_written(client: TestClient) -> None:
    assert BROKEN in client.post("/apply-template", json={"messages": chat(content="no")["messages"]}).json()["prompt"]


def test_a_result_of_null_is_an_empty_one(client: TestClient) -> None:
    shown = [
        client.post("/apply-template", json={"messages": chat(content=each)["messages"]}).json() for each in ("", None)
    ]
    assert shown[0] == shown[1]

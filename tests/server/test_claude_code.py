"""Requests to /v1/messages as Claude Code sends them: what is meant for Anthropic's servers does not stop an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec.server.chat import placed
from edgespec.server.web import NOTES

PATH = "/v1/messages?beta=true"
CACHED = {"cache_control": {"type": "ephemeral"}}
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "user-agent": "claude-cli/2.1.30 (external, cli)",
    "x-app": "cli",
}
BASH = {
    "name": "Bash",
    "description": "Executes a given bash command.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
REQUEST: dict[str, Any] = {
    "model": "claude-opus-4-6",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nThe date is today's.\n</system-reminder>"},
                {"type": "text", "text": "I want a table for two in San Jose.", **CACHED},
            ],
        }
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.30.a1b; cc_entrypoint=cli; cch=00000;"},
        {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **CACHED},
        {"type": "text", "text": "You help with tasks.", **CACHED},
    ],
    "tools": [BASH | CACHED, SEARCH],
    "metadata": {"user_id": "user_0_account__session_0"},
    "max_tokens": 32000,
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
TITLE: dict[str, Any] = {
    "model": "claude-haiku-4-5-20251001",
    "messages": [{"role": "user", "content": "Write a title: a table for two."}],
    "system": [{"type": "text", "text": "Generate a short title."}],
    "tools": [],
    "metadata": {"user_id": "user_0"},
    "max_tokens": 8,
    "temperature": 1,
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {}}}},
    "stream": False,
}


def test_a_turn_of_the_agent(client: TestClient):
    answered = client.post(PATH, json=REQUEST, headers=HEADERS)
    assert answered.status_code == 200, answered.text
    events = [json.loads(part.split("data: ")[1]) for part in answered.text.removesuffix("\n\n").split("\n\n")]
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert events[0]["message"]["model"] == "demo"
    notes = answered.headers[NOTES]
    noted = [note.partition(":")[0] for note in notes.split("; ")]
    assert sorted(noted) == ["context_management", "model", "thinking", "tools"]
    assert "web_search_20250305 is left out" in notes


def test_a_request_in_the_background(client: TestClient):
    answered = client.post(PATH, json=TITLE, headers=HEADERS)
    assert answered.status_code == 200, answered.text
    assert answered.json()["model"] == "demo" and "demo answers" in answered.headers[NOTES]


def test_tokens_are_counted_for_the_same_fields(client: TestClient):
    counted = {name: REQUEST[name] for name in ("model", "messages", "system", "tools", "thinking")}
    found = client.post("/v1/messages/count_tokens?beta=true", json=counted, headers=HEADERS)
    assert found.status_code == 200, found.text
    usage = client.post(PATH, json=REQUEST | {"stream": False, "max_tokens": 1}).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == found.json()["input_tokens"]


def test_the_line_for_billing_is_not_read(client: TestClient):
    """It has another number in each request: nothing behind it could be taken from the cache."""

    def prompt_tokens(*system: dict[str, Any]) -> int:
        fields = {"messages": TITLE["messages"], "system": list(system)}
        return client.post("/v1/messages/count_tokens", json=fields).json()["input_tokens"]

    assert prompt_tokens(*REQUEST["system"]) == prompt_tokens(*REQUEST["system"][1:])


def test_a_search_that_is_forced_is_an_error(client: TestClient):
    """The agent's tool WebSearch asks in this way; an answer without a search would be taken for its result."""
    fields = REQUEST | {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}
    answered = client.post(PATH, json=fields)
    assert answered.status_code == 400 and "no tools" in answered.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["adaptive", "enabled", "disabled"])
def test_thinking_of_a_model_that_never_does(client: TestClient, kind: str):
    fields = TITLE | {"thinking": {"type": kind}, "output_config": None}
    answered = client.post(PATH, json=fields)
    assert answered.status_code == 200 and ("thinking" in answered.headers[NOTES]) == (kind != "disabled")


def test_a_system_message_in_the_middle(client: TestClient):
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "A table for two."},
    ]
    answered = client.post(PATH, json=TITLE | {"messages": turns, "output_config": None})
    assert answered.status_code == 200 and "messages" not in answered.headers[NOTES]  # this template shows it


ONE_SYSTEM = """{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set messages = messages[1:] %}
{% endif %}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{{ message.role }}: {{ message.content }}
{% endfor %}"""
SILENT = """{% for message in messages %}{% if loop.first or message.role != 'system' %}{{ message.role }}:
{{ message.content }}{% endif %}{% endfor %}"""
ANY = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"


def roles(template: str, *given: tuple[str, Any]) -> list[tuple[str, Any]]:
    messages = [{"role": role, "content": content} for role, content in given]
    notes: list[str] = []
    found = [(message["role"], message["content"]) for message in placed(template, messages, notes)]
    assert bool(notes) == ("system" in [role for role, _ in given[2:]] and template != ANY)
    return found


@pytest.mark.parametrize("template", [ONE_SYSTEM, SILENT], ids=["refuses", "leaves out"])
def test_system_messages_where_a_template_shows_one_only(template: str):
    leading = (("system", "A"), ("system", "B"), ("user", "C"))
    middle = (("system", "A"), ("user", "B"), ("assistant", "C"), ("system", "D"), ("user", "E"), ("assistant", "F"))
    last = (("user", "B"), ("assistant", "C"), ("user", [{"type": "text", "text": "D"}]), ("system", "E"))
    for given in (leading, middle, last):
        assert roles(ANY, *given) == list(given)
    assert roles(template, *leading) == [("system", "A\n\nB"), ("user", "C")]
    assert roles(template, *middle) == [*middle[:3], ("user", "D\n\nE"), middle[5]]
    assert roles(template, *last) == [*last[:2], ("user", "D\n\nE")]
    picture = ("user", [{"type": "image"}])
    assert roles(template, ("user", "A"), ("assistant", "B"), picture, ("system", "C"))[2:] == [
        picture,
        ("user", "C"),
    ]

"""Requests to /v1/responses as Codex sends them: what is meant for OpenAI's servers does not stop an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec.chat.tools import ToolCall
from edgespec.server.responses import freeform_input
from edgespec.server.web import NOTES

PATH = "/v1/responses"
SHELL = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files. This is a FREEFORM tool.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF hunk+\n'},
}
DIFF = '*** Begin Patch\n*** Add File: a.txt\n+"hi"\n*** End Patch'


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


REQUEST: dict[str, Any] = {
    "model": "demo",
    "instructions": "You are a coding agent running in the Codex CLI.",
    "input": [
        said("developer", "<permissions instructions>Ask before you write.</permissions instructions>"),
        said("user", "<environment_context><cwd>/tmp</cwd></environment_context>"),
        said("user", "I want a table for two in San Jose."),
    ],
    "tools": [SHELL, PATCH, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-a",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0"},
    "truncation": "auto",
    "service_tier": "priority",
    "safety_identifier": "me",
    "max_output_tokens": 8,
}


def events(client: TestClient, **fields: Any) -> tuple[list[dict[str, Any]], str]:
    answered = client.post(PATH, json=REQUEST | fields, headers={"originator": "codex_cli_rs"})
    assert answered.status_code == 200, answered.text
    parts = answered.text.removesuffix("\n\n").split("\n\n")
    return [json.loads(part.split("data: ")[1]) for part in parts], answered.headers.get(NOTES, "")


def test_a_turn_of_the_agent(client: TestClient):
    found, notes = events(client)
    assert found[0]["type"] == "response.created" and found[-1]["type"] in ("response.completed", "response.incomplete")
    noted = [note.partition(":")[0] for note in notes.split("; ")]
    assert sorted(noted) == ["reasoning.effort", "text.verbosity", "tools", "truncation"]
    assert found[-1]["response"]["truncation"] == "disabled" and found[-1]["response"]["reasoning"]["effort"] is None


def test_a_conversation_that_does_not_fit_is_an_error_though_it_might_be_cut(client: TestClient):
    answered = client.post(PATH, json=REQUEST | {"input": "x " * 5000})
    assert (answered.status_code, answered.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_freeform_tool_is_called_with_a_text(client: TestClient, is_stream: bool):
    """It is forced, as the model here would hardly choose it; its text cannot be one of the grammar's."""
    choice = {"type": "custom", "name": "apply_patch"}
    fields = {"tool_choice": choice, "tools": [SHELL, PATCH], "max_output_tokens": 400, "temperature": 0}
    if not is_stream:
        answer = client.post(PATH, json=REQUEST | fields | {"stream": False}).json()
        (call,) = answer["output"]
    else:
        found, _ = events(client, **fields)
        (call,) = found[-1]["response"]["output"]
        added, delta, done, ended = found[2:-1]
        assert added["item"]["input"] == "" and added["item"]["status"] == "in_progress"
        assert delta["type"] == "response.custom_tool_call_input.delta" and delta["delta"] == call["input"]
        assert done["type"] == "response.custom_tool_call_input.done" and done["input"] == call["input"]
        assert ended["item"] == call and delta["item_id"] == call["id"]
    assert call["type"] == "custom_tool_call" and call["name"] == "apply_patch" and isinstance(call["input"], str)
    assert call["call_id"] and "arguments" not in call


def test_a_freeform_call_and_its_output_are_read_as_a_functions(client: TestClient):
    def prompt_tokens(*items: dict[str, Any]) -> int:
        fields = {"input": [*REQUEST["input"], *items], "stream": False, "max_output_tokens": 1}
        answered = client.post(PATH, json=REQUEST | fields)
        assert answered.status_code == 200, answered.text
        return answered.json()["usage"]["input_tokens"]

    named = {"call_id": "call_1", "name": "apply_patch"}
    arguments = json.dumps({"input": DIFF})
    freeform = prompt_tokens(
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {"type": "custom_tool_call", "input": DIFF, "status": "completed", **named},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "Done!"},
    )
    function = prompt_tokens(
        {"type": "function_call", "arguments": arguments, **named},
        {"type": "function_call_output", "call_id": "call_1", "output": "Done!"},
    )
    assert freeform == function


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(json.dumps({"input": DIFF}), DIFF), ('{"patch": 1}', '{"patch": 1}'), ("{", "{"), ('{"input": 5}',) * 2],
)
def test_the_text_of_a_freeform_call(arguments: str, text: str):
    assert freeform_input(ToolCall("apply_patch", arguments, "call_1")) == text

"""Tool calls in the known formats, whatever pieces the text comes in."""

from __future__ import annotations

import json

import pytest

from edgespec.chat.tool_forms import tool_parser
from edgespec.chat.tools import ToolParser

HERMES = "{% if tools %}<tool_call>{% endif %}"
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]"
NAMED = "{% if tools %}{% endif %}[TOOL_CALLS]{{ name }}[ARGS]"
PHI = "<|tool|>{{ message['tools'] }}<|/tool|>"
LLAMA = "{% if tools %}Environment: ipython{% endif %}"
Found = tuple[str, list[tuple[str, dict]]]


def parse(template: str, text: str, step: int) -> Found:
    """Text and calls of an answer that comes `step` characters at a time."""
    kind = tool_parser(template)
    assert kind is not None
    parser: ToolParser = kind()
    shown, calls = "", []
    for begin in range(0, len(text), step):
        if parser.is_over:
            break
        piece, found = parser.push(text[begin : begin + step])
        shown, calls = shown + piece, calls + found
    piece, found = parser.finish()
    return shown + piece, [(call.name, json.loads(call.arguments)) for call in calls + found]


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (HERMES, 'Hm.<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>', ("Hm.", [("f", {"a": [1]})])),
        (
            HERMES,
            '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g","arguments":"{\\"b\\":2}"}</tool_call>\n',
            ("", [("f", {}), ("g", {"b": 2})]),
        ),
        (HERMES, '<tool_call>{"name":"f"}</tool_call> So <tool_call>{"name":"g"}</tool_call>', ("", [("f", {})])),
        (HERMES, "<tool_call>no JSON</tool_call>", ("<tool_call>no JSON</tool_call>", [])),
        (HERMES, 'cut <tool_call>{"name": "f', ('cut <tool_call>{"name": "f', [])),
        (HERMES, "a < b <tool", ("a < b <tool", [])),
        (MISTRAL, 'Ok [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
         ("Ok ", [("f", {"a": 1}), ("g", {})])),
        (MISTRAL, "[TOOL_CALLS] [broken", ("[TOOL_CALLS] [broken", [])),
        (MISTRAL, "An [answer]", ("An [answer]", [])),
        (NAMED, 'Ok.[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
         ("Ok.", [("f", {"a": {"b": 1}}), ("g", {})])),
        (NAMED, '[TOOL_CALLS]f[ARGS]{"a": 1} and', ('[TOOL_CALLS]f[ARGS]{"a": 1} and', [])),
        (NAMED, "[TOOL_CALLS]f[ARGS][1]", ("[TOOL_CALLS]f[ARGS][1]", [])),
        (NAMED, "[TOOL_CALLS]f o[ARGS]{}", ("[TOOL_CALLS]f o[ARGS]{}", [])),
        (PHI, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]<|/tool_call|>',
         ("", [("f", {"a": 1}), ("g", {})])),
        (PHI, 'So <|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>', ("So ", [("f", {})])),
        (PHI, '<|tool_call|>[{"name": "f", "arguments": {}}]', ("", [("f", {})])),
        (PHI, '<|tool_call|>[{"name": "f"}, 3]<|/tool_call|>', ('<|tool_call|>[{"name": "f"}, 3]<|/tool_call|>', [])),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}', ("", [("f", {"a": 1})])),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
         ("", [("f", {}), ("g", {})])),
        (LLAMA, '{"city": "Paris"}', ('{"city": "Paris"}', [])),
        (LLAMA, "  An answer {}", ("  An answer {}", [])),
    ],
)  # fmt: skip
def test_calls_and_text_are_told_apart(template: str, text: str, expected: Found, step: int):
    assert parse(template, text, step) == expected


@pytest.mark.parametrize("template", [None, "{{ messages }}", "{% if tools %}<tool_call><function={% endif %}",
                                      "{{ tools }}<tool_call>f<arg_key>a</arg_key></tool_call>",
                                      "{{ tools }}<tool_call><invoke name='f'></tool_call>",
                                      "{{ tools }} ipython <function=f>{}</function>",
                                      "{{ tools }}<tool_calls>[{}]</tool_calls> after <tool_call>",
                                      "{{ tools }}<|tool_call|>[", "{{ tools }}"])  # fmt: skip
def test_a_format_that_is_not_known_has_no_parser(template: str | None):
    assert tool_parser(template) is None


def test_deep_json_is_no_call():
    text = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    assert parse(HERMES, text, 1_000_000) == (text, [])

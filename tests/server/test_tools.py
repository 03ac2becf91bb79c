"""Tool calls in the known formats, whatever pieces the text comes in."""

from __future__ import annotations

import json

import pytest

from edgespec.chat.tool_forms import call_form
from edgespec.chat.tools import ToolParser

HERMES = "{% if tools %}<tool_call>{% endif %}"
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]"
NAMED = "{% if tools %}{% endif %}[TOOL_CALLS]{{ name }}[ARGS]"
PHI = "<|tool|>{{ message['tools'] }}<|/tool|>"
XML = "{{ tools }}<tool_call>\n<function=f>\n<parameter=a>\n"
GLM = "{{ tools }}<tool_call>f<arg_key>a</arg_key><arg_value>"
GEMMA = "{{ tools }}<|tool_call>call:f{}<tool_call|>"
LFM = "List of tools: {{ tools }}<|im_start|>"
CHANNELS = "{{ tools }}<|channel|>commentary<|message|> to=functions.f"
TYPES = {
    "a": {"type": "string"},
    "n": {"type": ["integer", "null"]},
    "b": {"type": "boolean"},
    "l": {"type": "array"},
    "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "e": {"enum": ["1", "2"]},
    "r": {"$ref": "#/$defs/text"},
    "x": {"enum": ["None", None]},
}
PARAMETERS = {"type": "object", "properties": TYPES, "$defs": {"text": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
]
LLAMA = "{% if tools %}Environment: ipython{% endif %}"
Found = tuple[str, list[tuple[str, dict]]]


def parse(template: str, text: str, step: int) -> Found:
    """Text and calls of an answer that comes `step` characters at a time."""
    kind = call_form(template)
    assert kind is not None
    parser = ToolParser(kind, TOOLS)
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
        # without the marks, as small models write it
        (HERMES, '```json\n{"name": "f", "arguments": {"a": "`x`"}}\n```', ("", [("f", {"a": "`x`"})])),
        (HERMES, '\n{\n  "name": "g",\n  "arguments": {}\n}', ("", [("g", {})])),
        (
            HERMES,
            '```\n{"name": "f", "parameters": {}}\n```\n\n```json\n{"name": "g", "arguments": {}}```\nSo',
            ("", [("f", {}), ("g", {})]),
        ),
        (HERMES, '```json\n{"name": "f", "arguments": {"a": 1}}', ("", [("f", {"a": 1})])),
        (HERMES, '```json\n{"name": "f", "arguments": {"a"', ('```json\n{"name": "f", "arguments": {"a"', [])),
        (HERMES, '```json\n{"name": "h", "arguments": {}}\n```', ('```json\n{"name": "h", "arguments": {}}\n```', [])),
        (HERMES, '{"name": "f", "age": 3}', ('{"name": "f", "age": 3}', [])),
        (HERMES, '{"name": "f", "arguments": 3}', ('{"name": "f", "arguments": 3}', [])),
        (HERMES, '```{"name": "f", "arguments": {}}, 2]```', ('```{"name": "f", "arguments": {}}, 2]```', [])),
        (HERMES, "```python\nf()\n```", ("```python\nf()\n```", [])),
        (
            HERMES,
            '{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            ("", [("f", {}), ("g", {})]),
        ),
        (HERMES, "  ", ("  ", [])),
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
        (XML, "Hm.\n<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
              "<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>\n",
         ("Hm.\n", [("f", {"a": "5", "n": 5, "b": True})])),
        (XML, "<tool_call><function=f><parameter=a> x\n\ny </parameter><parameter=l>['q', {'r': None}]</parameter>"
              "<parameter=o>null</parameter><parameter=e>1</parameter></function></tool_call>\n"
              "<tool_call>\n<function=g>\n</function>\n</tool_call>",
         ("", [("f", {"a": " x\n\ny ", "l": ["q", {"r": None}], "o": None, "e": "1"}), ("g", {})])),
        (XML, "<tool_call><function=f><parameter=a>\nan </parameter> inside\n</parameter>\n"
              "<parameter=n>\nmany\n</parameter>\n<parameter=z>\n[1]\n</parameter></function></tool_call>",
         ("", [("f", {"a": "an </parameter> inside", "n": "many", "z": [1]})])),
        (XML, "<tool_call>no function</tool_call>", ("<tool_call>no function</tool_call>", [])),
        (XML, "<tool_call><function=f>words</function></tool_call>",
         ("<tool_call><function=f>words</function></tool_call>", [])),
        (XML, "<tool_call><function=f o></function></tool_call>",
         ("<tool_call><function=f o></function></tool_call>", [])),
        (GLM, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1\n2</arg_value>\n<arg_key>n</arg_key>\n"
              "<arg_value>3</arg_value>\n</tool_call><tool_call>g</tool_call>",
         ("", [("f", {"a": "1\n2", "n": 3}), ("g", {})])),
        (GLM, "<tool_call>f <b></tool_call>", ("<tool_call>f <b></tool_call>", [])),
        (GEMMA, '<|tool_call>call:f{a:<|"|>x, {y}: "z"<|"|>,n:-1.5,l:[1,<|"|>b<|"|>,{<|"|>k<|"|>:true,m:null}],'
                '"q": "w"}<tool_call|>',
         ("", [("f", {"a": 'x, {y}: "z"', "n": -1.5, "l": [1, "b", {"k": True, "m": None}], "q": "w"})])),
        (GEMMA, "<|tool_call>call:g{}<tool_call|><|tool_call>call:g{ }<tool_call|>", ("", [("g", {}), ("g", {})])),
        *((GEMMA, f"<|tool_call>{bad}<tool_call|>", (f"<|tool_call>{bad}<tool_call|>", [])) for bad in (
            "f{}", "call:f", "call:f[]", "call:f{a:}", "call:f{a:1", "call:f{a:1}}", "call:f{a:1,,}", "call:f{a 1}",
            'call:f{a:<|"|>x}', "call:f{1}", "call:f{a:" + "[" * 99 + "]" * 99 + "}")),
        (LFM, "<|tool_call_start|>[f(a='it\\'s', n=-2, l=[True, {\"k\": null}]), m.g()]<|tool_call_end|>So",
         ("", [("f", {"a": "it's", "n": -2, "l": [True, {"k": None}]}), ("m.g", {})])),
        (LFM, '<|tool_call_start|>[{"name": "f", "arguments": {"a": "x"}}]<|tool_call_end|>',
         ("", [("f", {"a": "x"})])),
        (LFM, "<|tool_call_start|>[convert-it(from='It's', to='a, 'b'', s=\"a\\/b\", w='x\ny', n=+1.5e3)]"
              "<|tool_call_end|>",
         ("", [("convert-it", {"from": "It's", "to": "a, 'b'", "s": "a/b", "w": "x\ny", "n": 1500.0})])),
        (LFM, "<|tool_call_start|>f()<|tool_call_end|>", ("", [("f", {})])),
        (XML, "<tool_call><function=f><parameter=a>see </tool_call> there</parameter></function></tool_call>",
         ("", [("f", {"a": "see </tool_call> there"})])),
        (XML, '<tool_call><function=f><parameter=l>{{"a": 1}}</parameter><parameter=n>NaN</parameter>'
              "<parameter=u>x</parameter></function></tool_call>",
         ("", [("f", {"l": '{{"a": 1}}', "n": "NaN", "u": "x"})])),
        (XML, "<tool_call><function=f><parameter=r>42</parameter><parameter=x>None</parameter></function></tool_call>",
         ("", [("f", {"r": "42", "x": "None"})])),
        (GEMMA, '<|tool_call>call:f{a:<|"|>in <tool_call|> marks<|"|>}<tool_call|>',
         ("", [("f", {"a": "in <tool_call|> marks"})])),
        (CHANNELS, '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a": "x"}<|call|>',
         ("", [("f", {"a": "x"})])),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>',
         ('<tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>', [])),
        *((LFM, f"<|tool_call_start|>{bad}<|tool_call_end|>", (f"<|tool_call_start|>{bad}<|tool_call_end|>", []))
          for bad in ("[f(1)]", "[f(**x)]", "[f(a=x)]", "[f(a=1j)]", "[f(a=g())]", "f(a=", "[f, g]",
                      "[(f)(a=1)(b=2)]", "[f(a=" + "[" * 99 + "]" * 99 + ")]", "[3]")),
        (CHANNELS, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}<|call|>',
         ("", [("f", {"a": "x"})])),
        (CHANNELS, 'So.<|channel|>commentary to=functions.f<|message|>{"a": "x"}', ("So.", [("f", {"a": "x"})])),
        (CHANNELS, "<|channel|>commentary to=functions.f<|message|>[1]<|call|>",
         ("<|channel|>commentary to=functions.f<|message|>[1]<|call|>", [])),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}', ("", [("f", {"a": 1})])),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
         ("", [("f", {}), ("g", {})])),
        (LLAMA, '{"city": "Paris"}', ('{"city": "Paris"}', [])),
        (LLAMA, "  An answer {}", ("  An answer {}", [])),
        (LLAMA, 'As in: {"name": "f", "parameters": {}}', ('As in: {"name": "f", "parameters": {}}', [])),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "a \\" and </tool_call> in it"}}</tool_call>',
         ("", [("f", {"a": 'a " and </tool_call> in it'})])),
        (PHI, '<|tool_call|>[{"name": "f", "arguments": {"a": "x<|/tool_call|>"}}]<|/tool_call|>',
         ("", [("f", {"a": "x<|/tool_call|>"})])),
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
    assert call_form(template) is None


def test_deep_json_is_no_call():
    text = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    assert parse(HERMES, text, 1_000_000) == (text, [])

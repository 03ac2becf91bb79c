"""Tool calls in every form, whole and in pieces; what models leave out or slip in, and calls that a limit cuts.

The slips are those of published models that the parsers of llama.cpp and vLLM are tested with, in words of our own.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec.chat.marks import Marks
from edgespec.chat.reasoning import ReasoningSplitter
from edgespec.chat.template import render_chat
from edgespec.chat.tool_forms import FORMS, PLAIN_FORMS, ToolForm, call_form
from edgespec.chat.tools import ToolCall, ToolParser
from serving import post

ALL = {form.name: form for form in (*FORMS, *PLAIN_FORMS)}
PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "state": {"type": "string"},
    "n": {"type": "number"},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "object"}]},
    "list": {"type": "array"},
}
TYPED: dict[str, Any] = {
    "a": {"type": "string"},
    "n": {"type": ["integer", "null"]},
    "b": {"type": "boolean"},
    "l": {"type": "array"},
    "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "e": {"type": "string", "enum": ["1", "2"]},
    "r": {"$ref": "#/$defs/text"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"text": {"type": "string"}}}
FUNCTIONS = {"find": PARAMETERS, "find.more": PARAMETERS, "f": PARAMETERS | {"properties": TYPED}, "g": {}}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": each}} for n, each in FUNCTIONS.items()]
TEXTS = ("", "Paris, « 75 »", "q\"u'o", "{x} [y], (z)", "two\nlines\n", "<b> & </b>", "```x```", "a\\b", "null", "7")
PIECES = (*"{}[]\"':, \n\\(<", "{{", "}}", "find", '"name"', '"arguments"', '{"name": "find", "arguments": {}}', "1e",
          '{"n": 1e2}', "tru", "NaN", "\\u12", '"\\ud83d"', "a=", "f(a=1)", "</parameter>", "```json", "```", ":0",
          "call:find{", '{"name": "Ann', "So call:me", "if a <")  # fmt: skip
Found = tuple[str, list[ToolCall]]


def read(form: ToolForm, text: str, step: int, *, is_cut: bool = False) -> Found:
    parser, shown, calls = ToolParser(form, TOOLS), "", list[ToolCall]()
    for begin in range(0, len(text), step):
        if not parser.is_over:
            piece, more = parser.push(text[begin : begin + step])
            shown, calls = shown + piece, calls + more
    if not parser.is_over:
        piece, more = parser.finish(is_cut=is_cut)
        shown, calls = shown + piece, calls + more
    return shown, calls


def both(form: ToolForm, text: str, step: int = 1, *, is_cut: bool = False) -> Found:
    """The text and the calls, which are the same whole and in pieces."""
    whole, pieces = (read(form, text, each, is_cut=is_cut) for each in (len(text) + 1, step))
    assert (whole[0], said(whole[1])) == (pieces[0], said(pieces[1])), text
    return whole


def said(calls: list[ToolCall]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


def made(rng: Random, *, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 2 else 3)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice((0, -3.5, 10**19, True, None))
    if kind < 5:
        return [made(rng, depth=depth + 1) for _ in range(rng.randrange(3))]
    return {key: made(rng, depth=depth + 1) for key in rng.sample(("a", "b c", "d-1"), rng.randrange(3))}


def some_calls(form: ToolForm, rng: Random) -> list[tuple[str, dict[str, Any]]]:
    values = {
        "city": lambda: rng.choice(TEXTS),
        "state": lambda: rng.choice(TEXTS),
        "n": lambda: rng.choice((0, -3.5, 10**19)),
        "either": lambda: rng.choice(("abc", 5, {"a": made(rng)})),
        "list": lambda: [made(rng)],
    }
    return [
        (rng.choice(("find", "find.more")), {key: values[key]() for key in rng.sample(list(values), rng.randrange(4))})
        for _ in range(1 + (form.takes_several and rng.random() < 0.5))
    ]


@pytest.mark.parametrize("name", ALL)
def test_calls_cut_anywhere_are_calls_or_text(name: str) -> None:
    """Nothing is lost and nothing made up, wherever a turn ends: by itself, or by a limit."""
    form, rng = ALL[name], Random(name)
    calls, before = some_calls(form, rng), "" if form.bare else rng.choice(("", "Hm.\n", "a < b "))
    text = before + form.written(calls)
    for end in range(len(text) + 1):
        step = 1 if rng.random() < 0.2 else 50
        shown, found = both(form, text[:end], step)
        for place, call in enumerate(found):  # where texts are bare, the last one may lack arguments
            arguments = json.loads(call.arguments)
            is_same = (call.name, arguments) == calls[place]
            assert is_same or (form.closed and place == len(found) - 1 and arguments.items() <= calls[place][1].items())
        assert shown == (text[:end] if not found else before) or text[:end].endswith(shown.removeprefix(before))
        shown, found = both(form, text[:end], step, is_cut=True)
        assert [(call.name, call.input) for call in found] == calls[: len(found)]
        assert found or shown == text[:end]
    assert [(call.name, json.loads(call.arguments)) for call in both(form, text)[1]] == calls


@pytest.mark.parametrize("name", ALL)
def test_pieces_of_calls_in_any_order_lose_nothing(name: str) -> None:
    form, rng = ALL[name], Random(name)
    whole = form.written([("find", {"city": "x", "n": 2})])
    head, argument = form.head.replace("{name}", "find").replace("{id}", "0"), form.argument.replace("{key}", "city")
    pieces = [*form.marks, head, argument, form.tail, form.closed, whole, *PIECES]
    for _ in range(80):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 12)))
        shown, calls = both(form, text)
        assert calls or shown == text
        assert all(isinstance(json.loads(call.arguments.encode()), dict) for call in calls)
        shown, calls = both(form, text, 3, is_cut=True)
        assert (calls or shown == text) and all(isinstance(call.input, dict) for call in calls)


@pytest.mark.parametrize("name", ALL)
def test_marks_behind_a_finished_call_may_be_missing(name: str) -> None:
    form = ALL[name]
    arguments = {"city": "Rome", "list": [1, {"a": None}]}
    text = form.written([("find", arguments)])
    least = len(text) - len(form.around[1]) - len(form.tail)
    least += form.tail.startswith(")")  # which ends the arguments, as a brace does
    least += form.argument == "{key}:"
    for end in range(least, len(text) + 1):
        (call,) = both(form, text[:end])[1]
        assert (call.name, json.loads(call.arguments)) == ("find", arguments), text[:end]


CITY = ("find", '{"city":"Rome"}')
SPACED = ("find", '{"city": "Rome"}')
OBJECT = '{"name":"find","arguments":{"city":"Rome"}}'
XML = "<function=find>\n<parameter=city>\nRome\n</parameter>\n</function>"
CALL, END = "<tool_call>", "</tool_call>"
BEGIN, SEP, LAST = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", f"{CALL}{OBJECT[:-1]}{END}", ("", [CITY])),
        ("hermes", f"{CALL}{OBJECT}\n{CALL}{OBJECT}{END}", ("", [CITY, CITY])),
        ("hermes", f"{CALL}{OBJECT}\n{OBJECT}{END}", ("", [CITY, CITY])),
        ("hermes", f"{CALL}[{OBJECT}, {OBJECT}]{END}", ("", [CITY, CITY])),
        ("hermes", f"{CALL}{{{OBJECT}}}{END}", ("", [CITY])),
        ("hermes", CALL + '{{"name": "find", "arguments": {{"city": "Rome"}}}}' + END, ("", [SPACED])),
        ("hermes", CALL + '{"name": "find", "arguments": {"city": "a\nb\tc"}}' + END,
         ("", [("find", '{"city": "a\\nb\\tc"}')])),
        ("hermes", CALL + "{'name': 'find', 'arguments': {'n': True,}}" + END, ("", [("find", '{"n": true}')])),
        ("hermes", CALL + '{"name": "find", "arguments": {"n": 1e2, "m": 1.0, "s": "\\u00fc"}}' + END,
         ("", [("find", '{"n": 1e2, "m": 1.0, "s": "\\u00fc"}')])),
        ("hermes", CALL + '{"name": "find", "arguments": "{\\"city\\": \\"Rome\\"}"}' + END, ("", [SPACED])),
        ("hermes", f"{CALL}no JSON{END}{CALL}{OBJECT}{END}", (f"{CALL}no JSON{END}", [CITY])),
        ("qwen_xml", XML, ("", [SPACED])),
        ("qwen_xml", f"Ok.\n{XML}\n{END}\n{CALL}\n{XML}\n{END}", ("Ok.\n", [SPACED, SPACED])),
        ("qwen_xml", f"{CALL}\n{XML}\n{XML}\n{END}", ("", [SPACED, SPACED])),
        ("qwen_xml", f"{CALL}\n{XML.replace('</parameter>', '')}\n{END}", ("", [SPACED])),
        ("qwen_xml", CALL + XML.replace("</parameter>", "<parameter=state>\nIT\n</parameter>") + END,
         ("", [("find", '{"city": "Rome", "state": "IT"}')])),
        ("qwen_xml", f"{CALL}\n<function=bad\n</function>\n{END}\n{CALL}\n{XML}\n{END}",
         (f"{CALL}\n<function=bad\n</function>\n{END}\n", [SPACED])),
        ("qwen_xml", f"{CALL}{OBJECT}{END}", ("", [CITY])),
        *(("qwen_xml", f"{CALL}<function=find><parameter=either>{value}</parameter></function>{END}",
           ("", [("find", f'{{"either": {json_value}}}')]))
          for value, json_value in (("abc", '"abc"'), ("5", "5"), ('{"a": 1e2}', '{"a": 1e2}'), ("true", '"true"'),
                                    ("[1]", '"[1]"'), ("5.5", '"5.5"'))),
        ("glm", "<tool_call>find\n</tool_call>", ("", [("find", "{}")])),
        ("seed", "<seed:tool_call>\n<function=find>\n<parameter=city>a\n b</parameter>\n</function>",
         ("", [("find", '{"city": "a\\n b"}')])),
        ("mistral", f"[TOOL_CALLS] [{OBJECT}]\nas said", ("", [CITY])),
        ("gemma", 'call:find{city:<|"|>Rome<|"|>}', ("", [SPACED])),
        ("gemma", '<|tool_call>:call:find{city:<|"|>Rome<|"|>}<tool_call|>', ("", [SPACED])),
        ("gemma", "<|tool_call>call:find{n:108.}", ("", [("find", '{"n": 108.0}')])),
        ("lfm", "<|tool_call_start|> [find(city='Rome'), find(n=07)", ("", [SPACED, ("find", '{"n": 7}')])),
        ("granite", '<|tool_call|> [{"arguments":{"city":"Rome"}, "name":"find"}]\nI will see.', ("", [CITY])),
        ("granite", f"<tool_call> [{OBJECT},\n {OBJECT}]", ("", [CITY, CITY])),
        ("deepseek", f"{BEGIN}function{SEP}find\n```json\n{CITY[1]}```{LAST}", ("", [CITY])),
        ("llama", '{"name": "find", "parameters": {"city": "Rome"}} as {find} says', ("", [SPACED])),
        ("hermes", '<tool_call>{"name":"f"}</tool_call> So <tool_call>{"name":"g"}</tool_call>', ("", [("f", '{}')])),
        # without the marks, as small models write it
        ("hermes", '```json\n{"name": "f", "arguments": {"a": "`x`"}}\n```', ("", [("f", '{"a": "`x`"}')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "a \\" and </tool_call> in it"}}</tool_call>',
         ("", [("f", '{"a": "a \\" and </tool_call> in it"}')])),
        ("qwen_xml", "<tool_call><function=f><parameter=a> x\n\ny </parameter>"
                     "<parameter=l>['q', {'r': None}]</parameter>"
                     "<parameter=o>null</parameter><parameter=e>1</parameter></function></tool_call>\n"
                     "<tool_call>\n<function=g>\n</function>\n</tool_call>",
         ("", [("f", '{"a": " x\\n\\ny ", "l": ["q", {"r": null}], "o": null, "e": "1"}'), ("g", '{}')])),
        ("qwen_xml", "<tool_call><function=f><parameter=a>\nan </parameter> inside\n</parameter>\n"
                     "<parameter=n>\nmany\n</parameter>\n<parameter=z>\n[1]\n</parameter></function></tool_call>",
         ("", [("f", '{"a": "an </parameter> inside", "n": "many", "z": [1]}')])),
        ("qwen_xml", '<tool_call><function=f><parameter=l>{{"a": 1}}</parameter><parameter=n>NaN</parameter>'
                     "<parameter=b>\nTrue\n</parameter></function></tool_call>",
         ("", [("f", '{"l": "{{\\"a\\": 1}}", "n": "NaN", "b": true}')])),
        ("qwen_xml", "<tool_call><function=f><parameter=r>42</parameter><parameter=a>None</parameter></function>",
         ("", [("f", '{"r": "42", "a": "None"}')])),
        ("gemma", '<|tool_call>call:f{a:<|"|>x, {y}: "z"<|"|>,n:-1.5,"q": "w"}<tool_call|>',
         ("", [("f", '{"a": "x, {y}: \\"z\\"", "n": -1.5, "q": "w"}')])),
        ("lfm", "<|tool_call_start|>[f(a='it\\'s', n=-2, l=[True, {\"k\": null}]), m.g()]<|tool_call_end|>So",
         ("", [("f", '{"a": "it\'s", "n": -2, "l": [true, {"k": null}]}'), ("m.g", '{}')])),
        ("lfm", "<|tool_call_start|>[convert-it(from='It's', to='a, 'b'', s=\"a\\/b\", w='x\ny', n=+1.5e3)]"
                "<|tool_call_end|>",
         ("", [("convert-it", '{"from": "It\'s", "to": "a, \'b\'", "s": "a/b", "w": "x\\ny", "n": 1.5e3}')])),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
         ("", [("f", '{}'), ("g", '{}')])),
    ],
)  # fmt: skip
def test_slips(form: str, text: str, expected: tuple[str, list[tuple[str, str]]]) -> None:
    for step in (1, 7):
        shown, calls = both(ALL[form], text, step)
        assert (shown, said(calls)) == expected


@pytest.mark.parametrize("step", [1, 1000])
def test_calls_may_end_the_reasoning(step: int) -> None:
    """Without its mark, which models forget then; calls that other text follows are thoughts about calls."""

    def split(text: str) -> tuple[str, str]:
        splitter = ReasoningSplitter(Marks("<think>", "</think>"), ToolParser(ALL["hermes"], TOOLS), is_open=True)
        parts = [splitter.push(text[at : at + step]) for at in range(0, len(text), step)] + [splitter.finish()]
        return "".join(part[0] for part in parts), "".join(part[1] for part in parts)

    call = f"{CALL}{OBJECT}{END}"
    assert split(f"So I look.\n{call}") == ("So I look.", call)
    assert split(call) == ("", call)
    for thought in (f"Shall I {call} or not?", f"The mark {CALL} begins one", f"{call}\nThen?", f"cut {CALL}{{"):
        assert split(thought) == (thought, "")
        assert split(f"{thought}</think>Yes") == (thought, "Yes")


def test_templates_that_show_calls_get_the_tools_in_the_system_message() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}" + BEGIN
        + "{{ c.function.name }}" + SEP + "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )  # fmt: skip
    form = call_form(source)
    assert form is not None and form.name == "deepseek"
    text = render_chat(source, [{"role": "user", "content": "QUESTION"}], tools=TOOLS)
    assert text.startswith("[system]You can call") and text.index("find.more") < text.index(BEGIN) < text.index("QUEST")
    again = render_chat(
        source, [{"role": "system", "content": "BE KIND"}, {"role": "user", "content": "x"}], tools=TOOLS
    )
    assert again.startswith("[system]BE KIND\n\nYou can call")


@pytest.mark.parametrize("template", [None, "{{ tools }}", "{% if tools %}<tool_call><function={% endif %}",
                                      "{{ tools }}<tool_call>f<arg_key>a</arg_key></tool_call>",
                                      "{{ tools }}<tool_calls>[{}]</tool_calls> after <tool_call>"])  # fmt: skip
def test_a_format_that_is_not_known_has_no_parser(template: str | None):
    assert call_form(template) is None


DEEP = "[" * 99 + "]" * 99
NO_CALLS: dict[str, tuple[str, ...]] = {
    "hermes": (f"{CALL} is the mark, {END} the other", '```json\n{"name": "h", "arguments": {}}\n```',
               '<tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>'),
    "qwen_xml": ("Write <function=name>...</function>.",),
    "mistral_named": ("[TOOL_CALLS]f o[ARGS]{}",),
    "gemma": ("A recall: call:somebody{}", *(f"<|tool_call>{bad}<tool_call|>" for bad in (
        "f{}", "call:f", "call:f{a:1}}", "call:f{a:1,,}", 'call:f{a:<|"|>x}', f"call:f{{a:{DEEP}}}"))),
    "lfm": tuple(f"<|tool_call_start|>{bad}<|tool_call_end|>" for bad in (
        "[f(1)]", "[f(**x)]", "[f(a=g())]", "f(a=", "[(f)(a=1)(b=2)]", f"[f(a={DEEP})]")),
    "channels": ("<|channel|>commentary to=functions.f<|message|>[1]<|call|>",),
    "llama": ('{"name": "find", "age": 3}',),
}  # fmt: skip


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in NO_CALLS.items() for text in texts])
def test_what_is_no_call_stays_text(form: str, text: str):
    assert both(ALL[form], text) == (text, [])


def test_deep_json_is_no_call():
    text = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    assert read(ALL["hermes"], text, 1_000_000) == (text, [])


def test_a_cut_call_is_text_and_the_limit_the_reason(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"note": {"type": "string", "minLength": 90}}, "required": ["note"]}
    tools = [{"type": "function", "function": {"name": "write", "parameters": schema}}]
    asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": "required"}
    (choice,) = post(client, "/v1/chat/completions", asked | {"temperature": 0, "max_tokens": 30})["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert '"name": "write", "arguments": {"note": "' in choice["message"]["content"]

"""Tools and calls in small templates of the published forms: nothing is lost, and calls are read back as they stand.

The templates are written for these tests in the forms of the models that `FORMS` names.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.chat.marks import ChannelSplitter
from edgespec.chat.messages import with_short_ids
from edgespec.chat.template import render_chat
from edgespec.chat.tool_forms import call_form
from edgespec.chat.tools import ToolParser
from edgespec.errors import PromptError

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endfor %}"
QWEN = "{% if tools %}{{ tools | tojson }}{% endif %}" + TURNS.replace("CALLS", (
    "{% for c in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
))  # fmt: skip
SMOLLM3 = "{% if xml_tools is defined %}{{ xml_tools }} within <tool_call></tool_call>{% endif %}" + TURNS.replace(
    "CALLS", ""
)
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message %}"
    "<|system|>{{ message['content'] }}<|tool|>{{ message['tools'] }}<|/tool|><|end|>"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('length 9') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
    "</s>{% endfor %}"
)
MINISTRAL = MISTRAL.replace("[CALL_ID]{{ c.id }}", "").replace("{% if c.id | length != 9 %}", "{% if false %}")
LLAMA = (
    "{% if tools %}Environment: ipython {{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
    '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", '
    '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}<|eot_id|>{% endfor %}'
)
CODER = "{% if tools %}{{ tools | tojson }}{% endif %}" + TURNS.replace("CALLS", (
    "{% for c in m.tool_calls %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>\n{% endfor %}"
))  # fmt: skip
GLM = "{% if tools %}{{ tools | tojson }}{% endif %}" + TURNS.replace("CALLS", (
    "{% for c in m.tool_calls %}\n<tool_call>{{ c.function.name }}\n"
    "{% for key, value in c.function.arguments | items %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
))  # fmt: skip
# The first one reads results from the message with the calls, later ones from messages of their own.
GEMMA_VALUES = (
    "{% macro shown(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v | items %}{{ '' if loop.first else ',' }}{{ k }}:{{ shown(w) }}{% endfor %}{{ '}' }}"
    "{% elif v is none %}null{% elif v is sequence %}[{% for w in v %}{{ '' if loop.first else ',' }}{{ shown(w) }}"
    "{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
GEMMA_CALLS = (
    "{% for c in m.tool_calls %}<|tool_call>call:{{ c.function.name }}{{ shown(c.function.arguments) }}<tool_call|>"
    "{% endfor %}"
)
GEMMA = (
    f"{GEMMA_VALUES}{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{{% for m in messages %}}"
    "<|im_start|>{{ m.role }}\n" + GEMMA_CALLS + "{% for r in m.tool_responses %}<|tool_response>response:{{ r.name }}"
    "{{ shown(r.response) }}<tool_response|>{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
)
GEMMA_LATER = GEMMA.replace("{{ m.content }}", "{% if m.role == 'tool' %}!{% endif %}{{ m.content }}")
LFM = "{% if tools %}List of tools: {{ tools | tojson }}{% endif %}" + TURNS.replace("CALLS", "")
CHANNELS = (
    "{% if tools %}namespace functions { {{ tools | tojson }} }{% endif %}{% for m in messages %}<|start|>{{ m.role }}"
    "{% for c in m.tool_calls %} to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% if m.content %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
JSON = "{{ c.function.arguments | tojson }}"
SEED = (
    CODER.replace("tool_call>", "seed:tool_call>")
    .replace(">\n{{ value", ">{{ value")
    .replace("\n</parameter", "</parameter")
)
GRANITE = (
    "{% if tools %}{% set available_tools = tools %}{{ available_tools | tojson }} in <|tool_call|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)


def in_order(before: str, call: str, between: str, after: str) -> str:
    """A template that writes the calls of a message one after another."""
    calls = (
        f"{before}{{% for c in m.tool_calls %}}{call}{{{{ '' if loop.last else '{between}' }}}}{{% endfor %}}{after}"
    )
    return "{% if tools %}{{ tools | tojson }}{% endif %}" + TURNS.replace(
        "CALLS", f"{{% if m.tool_calls %}}{calls}{{% endif %}}"
    )


BEGIN, CALL, SEP, END, LAST = (
    f"<\uff5ctool▁{part}\uff5c>" for part in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
DEEPSEEK = in_order(BEGIN, f"{CALL}{{{{ c.function.name }}}}{SEP}{JSON}{END}", "", LAST)
DEEPSEEK_JSON = in_order(BEGIN, f"{CALL}function{SEP}{{{{ c.function.name }}}}\n```json\n{JSON}\n```{END}", "\\n", LAST)
FORMS = {"seed": SEED, "granite": GRANITE, "deepseek": DEEPSEEK,
         "deepseek json": DEEPSEEK_JSON, "coder": CODER,
         "glm": GLM, "gemma": GEMMA, "gemma later": GEMMA_LATER, "lfm": LFM, "channels": CHANNELS,
         "qwen": QWEN, "smollm3": SMOLLM3, "phi": PHI, "mistral": MISTRAL,
         "ministral": MINISTRAL, "llama": LLAMA}  # fmt: skip
ENDS = ("<|im_end|>", "<|end|>", "</s>", "<|eot_id|>")
TYPED = [{"type": "function", "function": {
    "name": "find", "parameters": {"properties": {"city": {"type": "string"}, "n": {"type": "array"}}}}}]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


def conversation(*calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    made = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": None, "tool_calls": made}]


def rendered(source: str, messages: list[dict[str, Any]], tools: Any = TOOLS) -> str:
    return render_chat(source, with_short_ids(source, messages), tools=tools)


@pytest.mark.parametrize("form", FORMS)
def test_a_rendered_call_is_parsed_back(form: str) -> None:
    calls = [("find", {"city": "Paris, « 75 »", "n": [1, {"a": None}]})]
    calls += [] if form in ("llama", "channels") else [("book", {})]  # which call one at a time
    source = FORMS[form]
    text = rendered(source, conversation(*calls))
    answer = text[text.index("QUESTION") + len("QUESTION") :]
    answer = answer.split("assistant|>")[-1].split("assistant\n")[-1]
    for end in ENDS:
        answer = answer.removeprefix(end).replace(end, "")
    if form == "channels":
        answer = ChannelSplitter().push(answer.partition("assistant")[2])[1]
    kind = call_form(source)
    assert kind is not None
    parser = ToolParser(kind, TYPED)
    shown, found = parser.push(answer)
    piece, more = parser.finish()
    assert not (shown + piece).strip()
    assert [(call.name, json.loads(call.arguments)) for call in found + more] == calls


@pytest.mark.parametrize("form", FORMS)
def test_tools_results_and_earlier_texts_are_in_the_prompt(form: str) -> None:
    messages = conversation(("find", {"city": "Paris"}))
    messages += [{"role": "tool", "tool_call_id": "call_0", "content": "RESULT"}, {"role": "user", "content": "MORE"}]
    text = rendered(FORMS[form], messages)
    assert all(text.count(part) == 1 for part in ("QUESTION", "Paris", "RESULT", "MORE"))
    assert text.index("find") < text.index("QUESTION"), "the tools come first"
    with_system = rendered(FORMS[form], [{"role": "system", "content": "SYSTEM"}, *messages])
    assert with_system.count("SYSTEM") == 1 and "find" in with_system
    assert "find" not in rendered(FORMS[form], messages[:1], tools=None)


BROKEN = ['{"a": 2, "b', '{"code": "x\ny"}', '{"a": 1}{"a": 2}', "{'a': 1}", "a=1", "[1, 2]", '"x"', "7", "1" * 5000,
          '{"a": "\\ud800"}', '{"a": 1e400}', '{"a": NaN}',
          '{"a": ' * 99 + "1" + "}" * 99]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_broken_arguments_are_shown_as_one_argument(form: str) -> None:
    def shows(text: str, shown: str) -> bool:
        return text in shown or json.dumps(text, ensure_ascii=False) in shown

    for text in BROKEN:
        messages = conversation(("find", {}))
        messages[1]["tool_calls"][0]["function"]["arguments"] = text
        answered = [*messages, {"role": "tool", "tool_call_id": "call_0", "content": "no"}]
        assert shows(text, rendered(FORMS[form], answered))
    messages[1]["tool_calls"].append({"id": "b", "function": {"name": "find", "arguments": '{"city": "Paris"}'}})
    shown = rendered(FORMS[form], messages)
    assert shows(text, shown) and (form == "llama" or "Paris" in shown), "a call beside them is none of theirs"


def test_results_are_part_of_the_turn_with_the_calls() -> None:
    """Of Gemma 4's first template: the results in the order of the calls, and the answer behind them."""
    messages = conversation(("find", {}), ("book", {}))
    messages += [
        {"role": "tool", "tool_call_id": "call_1", "content": '{"seats": [2]}'},
        {"role": "tool", "content": "none left"},
        {"role": "assistant", "content": "ANSWER"},
        {"role": "user", "content": "MORE"},
    ]
    turns = rendered(GEMMA, messages).split("<|im_start|>")
    assert turns[2].startswith("assistant") and turns[2].endswith(
        '<|tool_response>response:book{seats:[2]}<tool_response|><|tool_response>response:book<|"|>none left<|"|>'
        "<tool_response|>ANSWER<|im_end|>\n"
    )
    assert [turn.split("\n")[0] for turn in turns[1:]] == ["user", "assistant", "user"]


def test_calls_without_ids_get_their_results_in_order() -> None:
    messages = conversation(("find", {}), ("book", {}))
    for call in messages[1]["tool_calls"]:
        call["id"] = None
    messages += [{"role": "tool", "content": "ONE", "tool_call_id": ["x"]}, {"role": "tool", "content": "TWO"}]
    text = rendered(GEMMA, messages)
    assert text.index("response:find") < text.index("ONE") < text.index("response:book") < text.index("TWO")


def test_a_template_that_shows_one_call_of_a_message_gets_one_each() -> None:
    messages = conversation(("find", {}), ("book", {}))
    messages += [
        {"role": "tool", "tool_call_id": "call_1", "content": "TWO"},
        {"role": "tool", "tool_call_id": "call_0", "content": "ONE"},
    ]
    first_only = CHANNELS.replace("{% for c in m.tool_calls %}", "{% for c in (m.tool_calls or [])[:1] %}")
    text = rendered(first_only, messages)
    places = [text.index(part) for part in ("to=functions.find", "ONE", "to=functions.book", "TWO")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["thinking", "reasoning_content"])
def test_reasoning_has_the_name_that_the_template_reads(name: str) -> None:
    source = TURNS.replace("CALLS", f"{{{{ m.{name} }}}}")
    answered = {"role": "assistant", "content": "YES", "reasoning_content": "HM"}
    assert "YESHM" in render_chat(source, [answered])
    call = conversation(("f", {}))[1]["tool_calls"]
    beside = render_chat(source + "{{ tool_calls }}", [answered | {"tool_calls": call}])
    assert ("HM" in beside) == (name == "reasoning_content"), "gpt-oss refuses thinking and a text beside calls"


def test_what_a_template_would_leave_out_is_refused() -> None:
    bare = TURNS.replace("CALLS", "")
    with pytest.raises(PromptError, match="does not support tools"):
        render_chat(bare, [{"role": "user", "content": "x"}], tools=TOOLS)


def test_calls_of_an_earlier_model_are_texts_where_the_template_shows_none() -> None:
    bare = TURNS.replace("CALLS", "")
    calls = conversation(("find", {"city": "Zürich"}), ("stop", {}))
    text = render_chat(bare, [*calls, {"role": "tool", "tool_call_id": "call_0", "content": "RESULT"}])
    assert '{"name": "find", "arguments": {"city": "Zürich"}}' in text and "<|im_start|>user\nRESULT" in text


def test_a_template_that_asks_for_none_shows_no_empty_answer_behind_calls() -> None:
    asking = DEEPSEEK.replace("{{ m.content }}", "{% if m['content'] is not none %}<{{ m.content }}>{% endif %}")
    text = rendered(asking, conversation(("find", {})))
    assert "<>" not in text and "<QUESTION>" in text


def test_an_answer_without_content_is_an_empty_one() -> None:
    """As OpenAI's clients send back an answer that was all reasoning."""
    text = render_chat(TURNS.replace("CALLS", ""), [{"role": "assistant", "content": None}])
    assert text == "<|im_start|>assistant\n<|im_end|>\n"
    with pytest.raises(PromptError, match="no text content"):
        render_chat(TURNS, [{"role": "user", "content": None}])


def test_a_template_may_go_through_tools_that_nobody_gave() -> None:
    assert render_chat("{% for t in tools %}x{% endfor %}{{ messages[0].content }}", conversation()[:1]) == "QUESTION"

"""Chat templates in the sandbox and from files, conversations, and what they hold from earlier turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import edgespec
from demo import TEST_THREADS
from edgespec.chat.conversation import Conversation, fit_context
from edgespec.chat.messages import checked_messages
from edgespec.chat.template import render_chat
from edgespec.cli.main import cli
from edgespec.errors import CapabilityError, ConfigError, PromptError, StateError
from tiny_gguf import TEMPLATE, Shape, write_model

HELLO = [{"role": "user", "content": "hello"}]
CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def test_a_template_sees_what_transformers_gives_it():
    turns = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    source = "{{ bos_token }}" + turns + "{{ tools | tojson }}{{ eos_token }}"
    tools = [{"name": "find", "tags": "<b>"}]
    text = render_chat(source, HELLO, tools=tools, bos_token="<s>", eos_token="</s>")
    assert text == '<s>[user] hello\n[{"name": "find", "tags": "<b>"}]</s>'


def test_the_block_that_marks_answers_for_training_is_what_it_holds():
    """Templates of SmolLM3 and LFM2.5 have it; what a block sets stays in it, as in transformers."""
    source = (
        "{% for m in messages %}{% generation %}{% set seen = m.content %}<{{ seen }}>{% endgeneration %}{% endfor %}"
        "{% generation %}{% set late = 1 %}{% endgeneration %}{{ late is defined }}"
    )
    assert render_chat(source, HELLO) == "<hello>False"
    with pytest.raises(CapabilityError, match="endgeneration"):
        render_chat("{% generation %}", HELLO)


SWITCH = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"


def test_a_template_gets_the_arguments_it_knows_and_no_others():
    assert render_chat(SWITCH, HELLO) == "hello"
    assert render_chat(SWITCH, HELLO, arguments={"enable_thinking": False}) == "hello<no>"
    with pytest.raises(PromptError, match=r"'thinking_budget'.*does not use it"):
        render_chat(SWITCH, HELLO, arguments={"thinking_budget": 3})
    for name in ("messages", "eos_token"):
        with pytest.raises(PromptError, match=name):
            render_chat(SWITCH + "{{ eos_token }}", HELLO, arguments={name: "x"})


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("{{ ''.__class__.__mro__ }}", CapabilityError, "forbidden"),
        ("{{ messages.append(1) }}", CapabilityError, "forbidden"),
        ("{% if %}", CapabilityError, "broken"),
        ("{% include '/etc/passwd' %}", CapabilityError, "fails"),
        ("{% for i in range(10 ** 8) %}{% endfor %}", CapabilityError, "fails"),
        ("{{ raise_exception('roles must alternate') }}", PromptError, "roles must alternate"),
        ("{{ nothing.at.all }}", PromptError, "undefined"),
    ],
)
def test_a_bad_template_is_a_typed_error(source, error, said):
    with pytest.raises(error, match=said):
        render_chat(source, HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ ('a' * 15000000).replace('a', 'b' * 15000000) }}",
        "{{ lipsum(n=999999999) }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_a_template_takes_no_more_than_it_may(source):
    """Each of these took gigabytes or never ended; one after it is rendered as ever."""
    with pytest.raises((CapabilityError, PromptError), match=r"template (cannot be used|fails|renders a prompt of)"):
        render_chat(source, HELLO)
    assert render_chat("{{ messages[0].content }}", HELLO) == "hello"


def test_a_template_that_reads_typed_parts_only_gets_them():
    source = "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}"
    source += "{% endif %}{% endfor %}|{% endfor %}"
    assert render_chat(source, [*HELLO, {"role": "assistant", "content": ""}]) == f"{HELLO[0]['content']}||"
    both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0]['type'] }}"
    assert render_chat(both + "{% endif %}{% endfor %}", HELLO) == HELLO[0]["content"]


def test_a_template_that_joins_tool_arguments_gets_them_as_text():
    call = {"type": "function", "function": {"name": "find", "arguments": '{"city": "Zürich"}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}"
    assert render_chat(source + "{% endfor %}{% endfor %}", messages) == 'find{"city": "Zürich"}'


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "empty"),
        *((given, "") for given in ("hi", b"hi", {"role": "user"}, 5, None, ["hi"], [None], [["role", "user"]])),
        ([{"role": "robot", "content": "x"}], "robot"),
        ([{"role": ["user"], "content": "x"}], ""),
        ([{"content": "x"}], "role"),
        ([{"role": "user"}], "no text content"),
        ([{"role": "user", "content": 3}], "no text content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], ""),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], ""),
        ([{"role": "assistant", "content": "", "tool_calls": ["x"]}], "not an object"),
        ([*HELLO, {"role": "user", "content": [{"type": "text", "text": None}]}], "without the field text"),
        ([*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": 5}]}], "allowed: an object"),
    ],
)
def test_a_message_that_cannot_be_used_is_named(messages, said):
    with pytest.raises(PromptError) as refused:
        checked_messages(messages)
    assert said in str(refused.value)


def exchanges(count: int, system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    for index in range(count):
        conversation.ask(f"question {index}")
        conversation.answer(f"answer {index}")
    return conversation


def test_undo_drops_the_last_exchange_with_all_that_answered_it():
    conversation = exchanges(2, "be brief")
    conversation.turns.append({"role": "tool", "content": "result"})
    assert [conversation.undo() for _ in range(3)] == ["question 1", "question 0", None]
    assert conversation.messages == [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize("system", [None, "be brief"])
def test_a_saved_conversation_loads_unchanged(tmp_path, system):
    conversation = exchanges(3, system)
    conversation.ask("ünïcødé 日本 \u2028")
    conversation.save(tmp_path / "new" / "saved.json")
    assert Conversation.load(tmp_path / "new" / "saved.json") == conversation
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["saved.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\udcff",
        '{"format": "edgespec-conversation", "version": 2, "messages": []}',
        '{"format": "edgespec-conversation", "version": 1, "messages": 3}',
        '{"format": "edgespec-conversation", "version": 1, "messages": [{"role": "x", "content": ""}]}',
        "[" * 100_000,
    ],
)
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(StateError, match=r"other\.json"):
        Conversation.load(path)


def ten_per_message(messages: list[dict[str, object]]) -> int:
    return 10 * len(messages)


def test_overflow_drops_the_oldest_and_leaves_room_to_reuse_the_cache():
    conversation = exchanges(4, "be brief")
    conversation.ask("question 4")
    assert fit_context(conversation, ten_per_message, context_length=100, reserve=20) == 3
    left = [message["content"] for message in conversation.messages]
    assert left == ["be brief", "question 3", "answer 3", "question 4"]
    assert ten_per_message(conversation.messages) + 20 <= 75


def test_a_message_that_alone_is_too_long_is_refused_and_nothing_is_lost():
    conversation = exchanges(3)
    conversation.ask("x")
    with pytest.raises(PromptError, match="10 tokens but the context holds only 10"):
        fit_context(conversation, ten_per_message, context_length=10, reserve=2)
    assert conversation.num_exchanges == 4


# -- what a conversation holds from earlier turns never makes a request fail: it is shown as far as it has a text


AND_NOW = {"role": "user", "content": "And now?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": "{}"}}]}


def contents(*messages: Any) -> list[str]:
    return [message["content"] for message in checked_messages(messages)]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": []}, ""),
        ({"content": {"ok": True, "name": "Zürich"}}, '{"ok": true, "name": "Zürich"}'),
        ({"content": [1, 2]}, "[1, 2]"),
        ({"content": 3}, "3"),
        ({"content": [{"type": "text", "text": "a"}, IMAGE]}, "a[image_url left out: this model reads text only]"),
        ({"content": {"type": "computer_screenshot", "image_url": "x"}},
         "[computer_screenshot left out: this model reads text only]"),
        ({"content": [{"type": "document", "source": {"type": "text", "data": "b"}, "title": "T"}]}, "T\nb"),
        ({"content": [{"type": "document", "source": {"type": "base64", "data": "AAAA"}}]},
         "[document left out: this model reads text only]"),
    ],
)  # fmt: skip
def test_a_tool_result_is_what_text_it_has(result: dict[str, Any], text: str) -> None:
    assert contents(AND_NOW, CALL, {"role": "tool", "tool_call_id": "c", **result})[-1] == text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [{"type": "output_text", "text": "a"}, {"type": "thinking", "thinking": "hm"}]}, "a"),
        ({"content": None, "audio": {"id": "a"}}, ""),
        (
            {"content": [{"type": "server_tool_use", "id": "s"}]},
            "[server_tool_use left out: this model reads text only]",
        ),
    ],
)
def test_an_earlier_answer_is_what_text_it_has(answer: dict[str, Any], text: str) -> None:
    assert contents(AND_NOW, {"role": "assistant", **answer}, AND_NOW)[1] == text


def test_an_image_is_refused_in_the_question_only() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}
    assert contents(asked, {"role": "assistant", "content": "A cat."}, AND_NOW)[0].startswith("What is it?[image_url")
    for waiting in ([asked], [asked, {"role": "assistant", "content": "It is"}], [AND_NOW, CALL, asked]):
        with pytest.raises(PromptError, match="image_url"):
            checked_messages(waiting)


def test_a_template_that_raises_for_a_text_gets_broken_arguments_as_one_argument() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{% if c.function.arguments is not mapping %}"
        "{{ raise_exception('an object!') }}{% endif %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}"
        "{% endfor %}{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": '{"a'}}
    assert render_chat(source, [{"role": "assistant", "content": "", "tool_calls": [call]}]) == 'arguments={"a'
    with pytest.raises(PromptError, match="at all"):
        render_chat("{{ raise_exception('at all') }}", [{"role": "assistant", "content": "", "tool_calls": [call]}])


# -- a chat template from a file: used instead of the model's, and checked before anything is loaded


GREETING = [{"role": "user", "content": "hello"}]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model without a chat template."""
    return write_model(tmp_path / "base.gguf", Shape(has_template=False))


def written_template(folder: Path, text: str) -> Path:
    path = folder / "template.jinja"
    path.write_text(text, encoding="utf-8")
    return path


def test_python_and_command_line_use_it(base: Path, tmp_path: Path) -> None:
    path = written_template(tmp_path, TEMPLATE + "!")
    with edgespec.load(base, chat_template_file=path, threads=TEST_THREADS, reproducible=False) as model:
        expected = model.encode("<|user|>hello<|end|><|assistant|>!", parse_special=True)
        assert model.encode_chat(GREETING) == expected
    words = ["generate", str(base), "-p", "hello", "-n", "1", "--json", "--no-reproducible"]
    found = CliRunner().invoke(cli, [*words, "--chat-template-file", str(path)])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["prompt_token_ids"] == expected
    without = CliRunner().invoke(cli, words)
    assert without.exit_code == 2 and "--chat-template-file" in without.stderr, "the error names the fix"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% for m in messages %}", "broken: line 1"),
        ("\n{% if messages %}{% endfor %}", "line 2"),
        ("You are a bot.", "does not mention 'messages'"),
        ("", "does not mention 'messages'"),
        ("{{ messages }}" + " " * (1 << 20), "more than 1048576 characters"),
    ],
)
def test_a_file_that_is_none_is_refused_before_the_model_is_looked_for(tmp_path: Path, text: str, said: str) -> None:
    path = written_template(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        edgespec.load(tmp_path / "missing.gguf", chat_template_file=path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused_by_every_command(base: Path, tmp_path: Path) -> None:
    binary = tmp_path / "binary.jinja"
    binary.write_bytes(b"{{ messages }}\xff")
    cases = ((tmp_path / "missing.jinja", "No such file"), (binary, "not UTF-8"), (tmp_path, "cannot be read"))
    for path, said in cases:
        for command in (["generate", "-p", "x"], ["chat"], ["serve", "--port", "0"]):
            found = CliRunner().invoke(cli, [*command, str(base), "--chat-template-file", str(path)])
            assert found.exit_code == 2 and said in found.stderr, found.output

"""What a conversation holds from earlier turns never makes a request fail: it is shown as far as it has a text."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.chat.messages import checked_messages
from edgespec.chat.template import render_chat
from edgespec.errors import PromptError

QUESTION = {"role": "user", "content": "And now?"}
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
    assert contents(QUESTION, CALL, {"role": "tool", "tool_call_id": "c", **result})[-1] == text


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
    assert contents(QUESTION, {"role": "assistant", **answer}, QUESTION)[1] == text


def test_an_image_is_refused_in_the_question_only() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}
    assert contents(asked, {"role": "assistant", "content": "A cat."}, QUESTION)[0].startswith("What is it?[image_url")
    for waiting in ([asked], [asked, {"role": "assistant", "content": "It is"}], [QUESTION, CALL, asked]):
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

"""Ids of tool calls for templates that take only nine letters and digits, as Mistral's do."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.chat.messages import wants_short_ids
from edgespec.chat.template import encode_messages
from table_engine import LetterVocabulary

# As Mistral's templates check ids, writing `c` for a call, `r` for its result and `x` for another one.
CHECK = (
    "{% set ns = namespace(id='') %}{% for m in messages %}"
    "{% for call in m.tool_calls or [] %}"
    "{% if call.id is not defined or call.id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    "{% set ns.id = call.id %}c{% endfor %}"
    "{% if m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    "{{ 'r' if m.tool_call_id == ns.id else 'x' }}{% endif %}{% endfor %}"
)


class Letters(LetterVocabulary):
    def __init__(self, template: str) -> None:
        super().__init__(26)
        self.chat_template = template


def turns(call_id: str | None, result_id: str | None) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}} | ({"id": call_id} if call_id else {})
    result = {"role": "tool", "content": "a"} | ({"tool_call_id": result_id} if result_id else {})
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


@pytest.mark.parametrize("name", ["call_0123456789abcdef", "toolu_01", "a", "abcde1234", None])
def test_every_protocols_ids_pass_a_template_that_wants_nine_letters(name: str | None):
    vocabulary = Letters(CHECK)
    ids = encode_messages(vocabulary, turns(name, name), None, "letters")
    assert vocabulary.decode(ids) == "cr"


def test_a_result_of_another_call_stays_one():
    vocabulary = Letters(CHECK)
    assert vocabulary.decode(encode_messages(vocabulary, turns("call_1", "call_2"), None, "letters")) == "cx"


def test_other_templates_see_the_ids_that_came():
    vocabulary = Letters("{{ messages[1].tool_calls[0].id }}{{ messages[2].tool_call_id }}")
    assert vocabulary.decode(encode_messages(vocabulary, turns("abc", "def"), None, "letters")) == "abcdef"
    assert not wants_short_ids("{{ messages|length }}")

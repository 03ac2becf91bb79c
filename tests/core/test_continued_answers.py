"""Answers taken apart and gone on with: a conversation's last message, reasoning, tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Model, Sampling
from edgespec.chat.marks import CHANNELS, KNOWN_MARKS, ChannelSplitter, Marks, control_text, reasoning_marks
from edgespec.chat.reasoning import Reasoning, ReasoningSplitter
from edgespec.chat.template import answer_prefix, encode_messages
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.errors import PromptError
from edgespec.vocabulary import Vocabulary
from tiny_gguf import TEMPLATE, write_model

QUESTION = [{"role": "user", "content": "Find me a restaurant in San Jose."}]
GREEDY = Sampling(temperature=0.0)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}</im>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What templates of several families do to an assistant's text; the rest of each is as above.
CUTS_THOUGHTS = CHATML.replace("m.content | trim", "m.content.split('</think>')[-1].lstrip('\\n')")
EMPTY_THOUGHTS = CHATML.replace(
    "{{ m.content | trim }}",
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content.strip() }}",
)
LAST_IS_OPEN = CHATML.replace("</im>\n{% endfor", "{% if not loop.last %}</im>\n{% endif %}{% endfor")
TWICE = "{{ messages[-1].content[:3] }}{{ messages[-1].content }}!" + CHATML
ANSWERS_LEFT_OUT = CHATML.replace(
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}</im>\n", "{% if m.role == 'user' %}x{% endif %}"
)
REFUSES = "{% if messages[-1].role != 'user' %}{{ raise_exception('the last message must be a question') }}{% endif %}"


def vocabulary(template: str) -> Vocabulary:
    """The demo's, with another template."""
    found = TokenizerFile(DEMO / "onnx" / "target", 4096)
    found.chat_template = template
    return found


def prompt(text: str, template: str = CHATML, **fields: Any) -> str:
    """The prompt of a conversation whose last message is an assistant's `text`; `|` is the control token."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text} | fields]
    demo = vocabulary(template)
    pieces = [demo.piece(token_id) or b"|" for token_id in encode_messages(demo, messages, None, "m")]
    return b"".join(pieces).decode()


@pytest.mark.parametrize("template", [CHATML, CUTS_THOUGHTS, LAST_IS_OPEN])
def test_the_prompt_ends_behind_the_text(template: str) -> None:
    assert prompt("The answer is (", template) == "|user\nHi</im>\n|assistant\nThe answer is ("
    for text in ("```python\n", "So \n\n", "a  "):
        assert prompt(text, template).endswith(f"|assistant\n{text}"), "templates cut blanks at the end of a message"
    parts: Any = [{"type": "text", "text": "The "}, {"type": "text", "text": "answer"}]
    assert prompt(parts, template).endswith("|assistant\nThe answer")


def test_templates_that_add_to_the_text_or_show_it_twice() -> None:
    assert prompt("So", EMPTY_THOUGHTS).endswith("|assistant\n<think>\n\n</think>\n\nSo")
    assert prompt("So", TWICE).startswith("SoSo!|user"), "and no mark is left in it"
    assert prompt("<think>\nHm.\n</think>\n\nYes, ", CUTS_THOUGHTS).endswith("|assistant\nYes, ")


@pytest.mark.parametrize("content", ["", " \n", None])
def test_an_empty_message_begins_the_turn(content: Any) -> None:
    """Some clients send the message that the answer is to fill."""
    assert prompt(content) == "|user\nHi</im>\n|assistant\n"
    assert answer_prefix([{"role": "assistant", "content": content}]) == ""


def test_a_message_with_calls_is_finished() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert prompt("So", CHATML + "{# tool_calls #}", tool_calls=[call]).endswith("So</im>\n|assistant\n")


@pytest.mark.parametrize(("template", "said"), [(ANSWERS_LEFT_OUT, "chat_template_file="), (REFUSES, "a question")])
def test_a_template_that_cannot_is_a_clear_error(template: str, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        prompt("So", template)


# -- reasoning


def test_an_answer_that_has_begun_reasons_no_more() -> None:
    template = CHATML + "{# <think> #}"
    assert Reasoning.of(vocabulary(template), []) == Reasoning(KNOWN_MARKS[0])
    assert Reasoning.of(vocabulary(template), [], "<think>Hm.</think>So") is None
    assert Reasoning.of(vocabulary(template), [], "<think>Hm") == Reasoning(KNOWN_MARKS[0], is_open=True)
    assert Reasoning.of(vocabulary(CHATML), [], "So") is None
    channels = Reasoning.of(vocabulary("<|channel|><|message|>"), [], "So")
    assert channels == Reasoning(CHANNELS, is_answering=True)


def test_a_channel_that_has_begun_goes_on() -> None:
    splitter = ChannelSplitter(is_answering=True)
    assert splitter.push("to=") == ("", "to="), "no header"
    assert splitter.push(" it<|end|><|start|>assistant<|channel|>analysis<|message|>Hm") == ("Hm", " it")
    assert splitter.finish() == ("", "")


# -- with a model


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with edgespec.load("demo", threads=TEST_THREADS, reproducible=True) as opened:
        yield opened


def test_a_cut_answer_goes_on_as_if_it_were_not(model: Model) -> None:
    whole = model.chat(QUESTION, GREEDY, GenerateOptions(max_tokens=24)).result()
    cut = model.chat(QUESTION, GREEDY, GenerateOptions(max_tokens=4)).result()
    assert cut.finish_reason == "length"
    begun = [*QUESTION, {"role": "assistant", "content": cut.text}]
    rest = model.chat(begun, GREEDY, GenerateOptions(max_tokens=20)).result()
    assert cut.text + rest.text == whole.text
    assert list(rest.prompt_token_ids) == model.encode_chat(begun)
    assert not set(rest.prompt_token_ids[-4:]) & model.target.vocabulary.end_ids
    assert model.split_reasoning(rest) == ("", rest.text)


def test_a_structure_cannot_hold_for_an_answer_that_has_begun(model: Model) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "It is "}]
    with pytest.raises(PromptError, match="json_schema"):
        model.chat(begun, GREEDY, GenerateOptions(json_schema={"type": "object"}))


# -- reasoning told apart from the answer behind it, whatever pieces the text comes in


THINK, BRACKETS = KNOWN_MARKS[0], KNOWN_MARKS[1]
HELLO = [{"role": "user", "content": "hello"}]


def split(text: str, step: int, *, is_open: bool = False, marks: Marks = THINK) -> tuple[str, str]:
    splitter = ReasoningSplitter(marks, is_open=is_open)
    parts = [splitter.push(text[begin : begin + step]) for begin in range(0, len(text), step)]
    parts.append(splitter.finish())
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 9, 1000])
@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm. a < b\n\nSo.\n</think>\n\nYes.\n", False, ("Hm. a < b\n\nSo.", "Yes.\n")),
        ("\n<think></think>Yes", False, ("", "Yes")),
        ("Yes <think>no</think>", False, ("", "Yes <think>no</think>")),
        ("  <thin", False, ("", "  <thin")),
        ("Hm.\n</think>\n\nYes", True, ("Hm.", "Yes")),
        ("<think>\nHm.</think>Yes </think>", True, ("Hm.", "Yes </think>")),
        ("</think>\nYes", True, ("", "Yes")),
        ("Hm. </thi", True, ("Hm. </thi", "")),
        ("<think>Hm.\n\n", False, ("Hm.", "")),
        ("<think>Hm.</think>\n\n", False, ("Hm.", "")),
        (" \n", False, ("", " \n")),
    ],
)
def test_reasoning_and_answer_are_told_apart(text: str, is_open: bool, expected: tuple[str, str], step: int) -> None:
    assert split(text, step, is_open=is_open) == expected
    other = text.replace("<think>", BRACKETS.opening).replace("</think>", BRACKETS.closing)
    if "<thi" not in other and "</thi" not in other:
        assert split(other, step, is_open=is_open, marks=BRACKETS) == tuple(
            each.replace("<think>", "[THINK]").replace("</think>", "[/THINK]") for each in expected
        )


def test_only_a_possible_mark_is_held_back() -> None:
    splitter = ReasoningSplitter(THINK)
    assert splitter.push("<think>Hm") == ("Hm", "")
    assert splitter.push(". a <") == (". a", "")
    assert splitter.push(" b </thi") == (" < b", "")
    assert splitter.push("s>") == (" </this>", "")
    assert splitter.push("</think>") == ("", "") and not splitter.is_answering
    assert splitter.push("\n\nYes <th") == ("", "Yes <th") and splitter.is_answering


def test_marks_come_from_the_chat_template() -> None:
    assert reasoning_marks(None) is None and reasoning_marks(TEMPLATE) is None
    assert reasoning_marks("{% if '</think>' in content %}") == THINK
    assert reasoning_marks("{{ '[THINK]' + block.thinking + '[/THINK]' }}") == BRACKETS


@pytest.mark.parametrize(("end", "is_open"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)])
def test_the_end_of_the_prompt_says_whether_the_answer_begins_inside(tmp_path: Path, end: str, is_open: bool) -> None:
    template = TEMPLATE + f"{{{{ '{end}' }}}}{{# <think> #}}".replace("\n", "\\n")
    path = write_model(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": template})
    with edgespec.load(str(path), threads=TEST_THREADS, reproducible=False) as model:
        vocabulary = model.target.vocabulary
        assert Reasoning.of(vocabulary, model.encode_chat(HELLO)) == Reasoning(THINK, is_open)
        end_id = vocabulary.encode("<|end|>", parse_special=True)[0]
        assert control_text(vocabulary, end_id, ("<|end|>",)) == "<|end|>"
        assert control_text(vocabulary, end_id, ("<|user|>",)) == ""
        assert control_text(vocabulary, vocabulary.encode("a")[0], ("a",)) == "", "it prints itself"


# -- a finished answer taken apart in Python: reasoning, text, tool calls, and the message for the next turn


TOOLS = [{"type": "function", "function": {"name": "FindBus", "parameters": {"type": "object"}}}]
BUS = [{"role": "user", "content": "Find me a bus to Fresno."}]
CALL = '<tool_call>\n{"name": "FindBus", "arguments": {"to": "Fresno"}}\n</tool_call>'


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def talker(request: pytest.FixtureRequest) -> Iterator[Model]:
    with edgespec.load("demo", engine=request.param, threads=TEST_THREADS, reproducible=False) as found:
        yield found


def answered(talker: Model, text: str) -> edgespec.Result:
    """The result of a chat that is made to answer `text`."""
    pattern = "".join(f"[{letter}]" if letter in "{}()" else letter for letter in text)
    options = GenerateOptions(max_tokens=120, regex=pattern)
    return talker.chat(BUS, Sampling(temperature=0.0), options, tools=TOOLS).result()


def test_calls_are_taken_out_of_the_text_and_go_into_the_next_turn(talker: Model) -> None:
    result = answered(talker, CALL)
    parts = talker.split_answer(result, TOOLS)
    (call,) = parts.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("FindBus", {"to": "Fresno"})
    assert (parts.text.strip(), parts.reasoning) == ("", "")
    messages = [*BUS, parts.as_message(), {"role": "tool", "tool_call_id": call.id, "content": "9:00"}]
    shown = talker.decode(talker.encode_chat(messages, TOOLS))
    assert "Fresno" in shown.split("FindBus")[-1] and shown.index("FindBus") < shown.index("9:00")


def test_what_is_no_call_stays_in_the_text(talker: Model) -> None:
    for text in ("At 9 there is one", CALL[:40]):
        parts = talker.split_answer(answered(talker, text), TOOLS)
        assert (parts.text, parts.tool_calls) == (text, ())
    assert talker.split_answer(answered(talker, CALL)).text == CALL, "nobody asked for calls"
    assert parts.as_message() == {"role": "assistant", "content": CALL[:40]}


def test_an_answer_that_was_cut_while_it_reasoned_goes_on_reasoning(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{# <think> #}")
    begun = [*BUS, {"role": "assistant", "content": "<think>Hm, so"}]
    options = GenerateOptions(max_tokens=60, regex=" yes.</think>The answer")
    with edgespec.load("demo", chat_template_file=path, threads=TEST_THREADS, reproducible=False) as talker:
        result = talker.stream(talker.encode_chat(begun), Sampling(temperature=0.0), options).result()
        parts = talker.split_answer(result, messages=begun)
        assert (parts.reasoning.strip(), parts.text) == ("yes.", "The answer")

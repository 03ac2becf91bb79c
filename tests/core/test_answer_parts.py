"""A finished answer taken apart in Python: reasoning, text, tool calls, and the message for the next turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Model, Sampling

TOOLS = [{"type": "function", "function": {"name": "FindBus", "parameters": {"type": "object"}}}]
HELLO = [{"role": "user", "content": "Find me a bus to Fresno."}]
CALL = '<tool_call>\n{"name": "FindBus", "arguments": {"to": "Fresno"}}\n</tool_call>'


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with edgespec.load("demo", engine=request.param, threads=TEST_THREADS, reproducible=False) as found:
        yield found


def answered(model: Model, text: str) -> edgespec.Result:
    """The result of a chat that is made to answer `text`."""
    pattern = "".join(f"[{letter}]" if letter in "{}()" else letter for letter in text)
    options = GenerateOptions(max_tokens=120, regex=pattern)
    return model.chat(HELLO, Sampling(temperature=0.0), options, tools=TOOLS).result()


def test_calls_are_taken_out_of_the_text_and_go_into_the_next_turn(model: Model) -> None:
    result = answered(model, CALL)
    parts = model.split_answer(result, TOOLS)
    (call,) = parts.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("FindBus", {"to": "Fresno"})
    assert (parts.text.strip(), parts.reasoning) == ("", "")
    messages = [*HELLO, parts.as_message(), {"role": "tool", "tool_call_id": call.id, "content": "9:00"}]
    shown = model.decode(model.encode_chat(messages, TOOLS))
    assert "Fresno" in shown.split("FindBus")[-1] and shown.index("FindBus") < shown.index("9:00")


def test_what_is_no_call_stays_in_the_text(model: Model) -> None:
    for text in ("At 9 there is one", CALL[:40]):
        parts = model.split_answer(answered(model, text), TOOLS)
        assert (parts.text, parts.tool_calls) == (text, ())
    assert model.split_answer(answered(model, CALL)).text == CALL, "nobody asked for calls"
    assert parts.as_message() == {"role": "assistant", "content": CALL[:40]}


def test_an_answer_that_was_cut_while_it_reasoned_goes_on_reasoning(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{# <think> #}")
    begun = [*HELLO, {"role": "assistant", "content": "<think>Hm, so"}]
    options = GenerateOptions(max_tokens=60, regex=" yes.</think>The answer")
    with edgespec.load("demo", chat_template_file=path, threads=TEST_THREADS, reproducible=False) as model:
        result = model.stream(model.encode_chat(begun), Sampling(temperature=0.0), options).result()
        parts = model.split_answer(result, messages=begun)
        assert (parts.reasoning.strip(), parts.text) == ("yes.", "The answer")

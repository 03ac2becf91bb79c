"""Reasoning told apart from the answer behind it, whatever pieces the text comes in."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgespec
from demo import TEST_THREADS
from edgespec.chat.marks import KNOWN_MARKS, Marks, control_text, reasoning_marks
from edgespec.chat.reasoning import Reasoning, ReasoningSplitter
from tiny_gguf import TEMPLATE, write_model

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
        ("<thick>", False, ("", "<thick>")),
        ("Hm.\n</think>\n\nYes", True, ("Hm.", "Yes")),
        ("<think>\nHm.</think>Yes </think>", True, ("Hm.", "Yes </think>")),
        ("</think>\nYes", True, ("", "Yes")),
        ("Hm. </thi", True, ("Hm. </thi", "")),
        ("<thi", True, ("<thi", "")),
        ("<think>Hm.\n\n", False, ("Hm.", "")),
        ("<think>Hm.</think>\n\n", False, ("Hm.", "")),
        ("", True, ("", "")),
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

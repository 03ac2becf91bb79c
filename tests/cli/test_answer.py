"""How an answer is printed: words whole at the margin, tool calls readable, the exact text where nobody looks on."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from edgespec.chat.marks import KNOWN_MARKS
from edgespec.chat.reasoning import Reasoning
from edgespec.cli.answer import AnswerPrinter, ToolCalls, WordWrap, readable
from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.reports import TokenEvent
from table_engine import LetterVocabulary

TEXT = "The quick brown fox jumps over the lazy dog, twice.\nThen it sleeps."


def wrapped(text: str, columns: int, step: int = 1) -> str:
    wrap = WordWrap()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        return "".join(wrap.push(text[i : i + step]) for i in range(0, len(text), step)) + wrap.end()


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize("columns", [8, 12, 20, 80])
def test_lines_end_between_words_however_the_text_comes(step, columns):
    lines = wrapped(TEXT, columns, step).split("\n")
    assert all(len(line.rstrip()) <= columns for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(TEXT.split())
    assert lines[-1] == "Then it sleeps." or columns < 15


@pytest.mark.parametrize(
    "text",
    [
        "    indented = 'a line of code that is wider than twenty'\n",
        "```\nx = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n```\n",
        "| a table | with a very wide | row |\n",
        "https://example.org/a/long/address/without/blanks\n",
        "trailing blanks   \n\n  \n",
    ],
)
def test_code_tables_and_long_words_stay_as_they_are(text):
    assert wrapped(text, 20) == text


def test_text_after_code_is_wrapped_again_and_wide_characters_are_not_held_back():
    assert WordWrap().push("今日は") == "今日は" and wrapped(TEXT, 60) == TEXT
    assert wrapped("```\na b c d e f g h\n```\naa bb cc dd", 8) == "```\na b c d e f g h\n```\naa bb cc\ndd"


CALL = '<tool_call>{"name": "FindBus", "arguments": {"to": "Fresno", "seats": 2}}</tool_call>'


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_a_tool_call_is_readable(step):
    calls = ToolCalls()
    text = f"Let me see. {CALL}\nDone."
    shown = "".join(calls.push(text[i : i + step]) for i in range(0, len(text), step)) + calls.end()
    assert shown == 'Let me see. [calls FindBus(to="Fresno", seats=2)]\nDone.'


def test_a_tool_result_is_readable():
    text = '<tool_response>{"city": "Oakland", "open": true}</tool_response>\nYes.'
    assert readable(text) == '[tool result: city="Oakland", open=true]\nYes.'
    assert readable(CALL + text) == f"{readable(CALL)}{readable(text)}"


@pytest.mark.parametrize(
    "text", ["a < b and <tool", "<tool_call>{broken</tool_call>", "<tool_call>never ends", "<tool_call>[1]</tool_call>"]
)
def test_what_is_no_tool_call_is_shown_as_it_is(text):
    calls = ToolCalls()
    assert calls.push(text) + calls.end() == text


def printed(monkeypatch, capsys, *texts: str, is_terminal: bool, **options: bool) -> str:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setenv("COLUMNS", "20")
    printer = AnswerPrinter(LetterVocabulary(26), **options)
    for index, text in enumerate(texts):
        printer.push(TokenEvent(0, text, index, "ngram"))
    printer.end_line()
    assert printer.parts == ("", "".join(texts))
    return capsys.readouterr().out


def test_a_pipe_and_raw_get_the_exact_text(monkeypatch, capsys):
    texts = ("four words in a row, and ", "more of them. ", CALL)
    whole = "".join(texts) + "\n"
    assert printed(monkeypatch, capsys, *texts, is_terminal=False) == whole
    assert printed(monkeypatch, capsys, *texts, is_terminal=True, raw=True) == whole
    laid_out = printed(monkeypatch, capsys, *texts, is_terminal=True)
    assert laid_out == 'four words in a row,\nand more of them.\n[calls\nFindBus(to="Fresno",\nseats=2)]\n'


def reasoned(monkeypatch: pytest.MonkeyPatch, path: Path, text: str, *, terminal: bool, raw: bool = False) -> str:
    """What is printed of an answer of a reasoning model, with escapes where it goes to a terminal."""
    shown: list[str] = []
    monkeypatch.setattr("edgespec.cli.answer.click.echo", lambda text="\n", nl=True: shown.append(text))
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setattr("edgespec.cli.answer.has_escapes", lambda: terminal)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((40, 20)))
    with VocabularyFile(path) as vocabulary:
        printer = AnswerPrinter(vocabulary, Reasoning(KNOWN_MARKS[0]), raw=raw)
        for letter in text:
            printer.push(TokenEvent(vocabulary.encode("a")[0], letter, 0, None))
        printer.end_line()
    assert printer.parts == ("I plan.", "Yes.")
    return "".join(shown)


def test_reasoning_is_dimmed_in_a_terminal_and_exact_elsewhere(monkeypatch: pytest.MonkeyPatch, target_path: Path):
    text = "<think>\nI plan.\n</think>\n\nYes."
    looked_at = reasoned(monkeypatch, target_path, text, terminal=True)
    assert click.unstyle(looked_at) == "I plan.\n\nYes.\n"
    assert "\x1b[2mI" in looked_at and looked_at.endswith("Yes.\n") and "\x1b" not in looked_at[-6:]
    assert reasoned(monkeypatch, target_path, text, terminal=True, raw=True) == text + "\n"
    assert reasoned(monkeypatch, target_path, text, terminal=False) == text + "\n"

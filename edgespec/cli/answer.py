"""Prints an answer as it comes: word wrap, dimmed reasoning and readable tool calls in a terminal, the exact text
elsewhere.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from typing import Any

import click
from rich.cells import cell_len

from edgespec.chat.reasoning import AnswerSplitter, Reasoning
from edgespec.cli import has_escapes, printable
from edgespec.cli.terminal import stops
from edgespec.generation.handle import Generation
from edgespec.reports import TokenEvent
from edgespec.vocabulary import Vocabulary

_WHOLE = re.compile(r"<tool_(call|response)>(.*?)</tool_\1>", re.DOTALL)
_BEGUN = re.compile(r"<tool_(call|response)>((?!</tool_\1>).)*$|<[a-z_]{0,13}$", re.DOTALL)
_FENCE, _PIECES = "```", re.compile(r"\n|[^\S\n]+|\S+")


class AnswerPrinter:
    """Prints the text of events to stdout as it comes.

    In a terminal, unless `raw`, words are not broken at the margin, tool calls are shown readably, and with `reasoning`
    the marks of the reasoning are left out and its text is dimmed. Headers of channels are left out elsewhere too: they
    are no text. `parts` has reasoning and answer apart, whatever is printed.
    """

    def __init__(self, vocabulary: Vocabulary, reasoning: Reasoning | None = None, *, raw: bool = False) -> None:
        self.parts = ("", "")  # (reasoning, answer); without `reasoning`, all is answer
        self._splitter = AnswerSplitter(vocabulary, reasoning)
        self._is_terminal = sys.stdout.isatty()
        self._is_laid_out = self._is_terminal and not raw
        self._wrap, self._calls = WordWrap(), ToolCalls()
        self._dims = self._is_laid_out and has_escapes()
        self._splits = reasoning is not None and (self._dims or reasoning.marks.has_channels)
        self._is_reasoning = False
        self._last = ""

    def print_all(self, answer: Generation) -> bool:
        """Print the events of `answer` until it ends or is interrupted: whether it was."""
        with answer, stops(answer.cancel) as interruption:
            for event in answer:
                self.push(event)
                if interruption.is_set():
                    break
        self.end_line()
        return interruption.is_set()

    def push(self, event: TokenEvent) -> None:
        split = self._splitter.push(event.token_id, event.text)
        self._take(split.reasoning, split.text, event.text)

    def _take(self, reasoning: str, answer: str, written: str) -> None:
        """Remember two parts of the text, and print them, or what was `written` where no reasoning is told apart."""
        self.parts = (self.parts[0] + reasoning, self.parts[1] + answer)
        if not self._splits:
            reasoning, answer = "", written
        if reasoning:
            self._is_reasoning = True
            self._print(reasoning)
        if answer and self._is_reasoning:
            self._print("", is_end=True)
            self._is_reasoning, self._wrap = False, WordWrap()
            self._print("\n\n")
        self._print(answer)

    def end_line(self) -> None:
        """Print what was held back and end the line, so that notes on the answer begin a new one."""
        rest = self._splitter.finish()
        self._take(rest.reasoning, rest.text, "")
        self._print("", is_end=True)
        if not self._last.endswith("\n"):
            click.echo()

    def _print(self, text: str, *, is_end: bool = False) -> None:
        """Print text as it is laid out, at the end of a part also what is held of it."""
        if self._is_laid_out and not self._is_reasoning:
            text = self._calls.push(text) + (self._calls.end() if is_end else "")
        if self._is_terminal:
            text = printable(text)
        if self._is_laid_out:
            text = self._wrap.push(text) + (self._wrap.end() if is_end else "")
        if text:
            self._last = text
            click.echo(click.style(text, dim=True) if self._is_reasoning and self._dims else text, nl=False)


class ToolCalls:
    """Turns `<tool_call>{...}</tool_call>` and tool responses into one readable line; the rest passes as it comes."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """What can be shown after `text`; a call is held back until it is complete."""
        whole = readable(self._held + text)
        begun = _BEGUN.search(whole)
        passed = len(whole) if begun is None else begun.start()
        self._held = whole[passed:]
        return whole[:passed]

    def end(self) -> str:
        """What was held back: a call that never ended is shown as it is."""
        held, self._held = self._held, ""
        return held


def readable(text: str) -> str:
    """A whole text with readable tool calls and responses."""
    return _WHOLE.sub(_readable, text)


def _readable(found: re.Match[str]) -> str:
    """`[calls NAME(key=value, ...)]` or `[tool result: key=value, ...]`; what is no such JSON stays as it is."""
    is_call = found[1] == "call"
    try:
        content: Any = json.loads(found[2])
        fields = (content.get("arguments") or {}) if is_call else content
        given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in fields.items())
        return f"[calls {content['name']}({given})]" if is_call else f"[tool result: {given}]"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return found[0]


class WordWrap:
    """Breaks lines between words instead of inside them, as text comes in; nothing that was printed is taken back.

    A word is held back until it ends. Indented lines, tables and code between fences stay as they are, so that code can
    be copied. Wide characters (CJK), which need no space between them, are left to the terminal.
    """

    def __init__(self) -> None:
        self._column = 0
        self._gap = self._word = ""  # what is held back
        self._line = ""  # the first characters of the line
        self._is_code = False  # between fences

    def push(self, text: str) -> str:
        """What can be printed now."""
        return "".join(map(self._take, _PIECES.findall(text)))

    def end(self) -> str:
        """What was held back."""
        columns = shutil.get_terminal_size().columns
        gap, word, self._gap, self._word = self._gap, self._word, "", ""
        self._line = (self._line + gap + word)[: len(_FENCE)]
        is_text = not self._is_code and not self._line.startswith(("  ", "\t", "|"))
        if is_text and word and self._column and self._column + len(gap) + cell_len(word) > columns:
            self._column, gap = 0, "\n"
        self._column = (self._column + len(gap.strip("\n")) + cell_len(word)) % (columns + 1)
        return gap + word

    def _take(self, piece: str) -> str:
        if piece == "\n":
            held = self.end()
            self._is_code ^= self._line.startswith(_FENCE)
            self._column, self._line = 0, ""
            return held + piece
        if piece.isspace():
            held = self.end() if self._word else ""
            self._gap += piece
            return held
        self._word += piece
        return self.end() if cell_len(piece) > len(piece) else ""

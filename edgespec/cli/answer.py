"""Prints an answer as it comes: word wrap, dimmed reasoning and readable tool calls in a terminal, the exact text
elsewhere.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import click
from rich.cells import cell_len

from edgespec.chat.reasoning import Reasoning
from edgespec.cli import has_escapes, printable
from edgespec.cli.terminal import note
from edgespec.reports import TokenEvent
from edgespec.vocabulary import Vocabulary

DRAFT_COLOUR = "cyan"
_OPENINGS = ("<tool_call>", "<tool_response>")
_FENCE, _TAB = "```", 8


class AnswerPrinter:
    """Prints the text of events to stdout as it comes; `text` is all of it, unchanged.

    In a terminal, unless `raw`, words are not broken at the margin, tool calls are shown readably, and with `reasoning`
    the marks of the reasoning are left out and its text is dimmed. Headers of channels are left out elsewhere too: they
    are no text. The last event ends the line, so that notes on the answer begin a new one. `parts` has reasoning and
    answer apart, whatever is printed.
    """

    def __init__(
        self, *, show_draft: bool = False, raw: bool = False, reasoning: tuple[Reasoning, Vocabulary] | None = None
    ) -> None:
        self.text = ""
        self.parts = ("", "")  # (reasoning, answer); without `reasoning`, all is answer
        self._reasoning = reasoning
        self._splitter = None if reasoning is None else reasoning[0].splitter()
        self._show_draft = show_draft and has_escapes()
        if show_draft and not self._show_draft:
            note("--show-draft: no colours here (TERM=dumb or NO_COLOR)")
        self._is_terminal = sys.stdout.isatty()
        is_laid_out = self._is_terminal and not raw
        self._wrap = WordWrap() if is_laid_out else None
        self._calls = ToolCalls() if is_laid_out and not self._show_draft else None
        self._dims = is_laid_out and has_escapes()
        self._splits = reasoning is not None and (self._dims or reasoning[0].marks.has_channels)
        self._is_reasoning = self._is_dim = False
        self._last = ""
        self._has_ended = False

    def push(self, event: TokenEvent) -> None:
        self.text += event.text
        if self._splitter is None:
            reasoning, answer = "", event.text
        else:
            reasoning, answer = self._splitter.push(self._mark(event) + event.text)
        self._take(reasoning, answer, event.from_draft)
        if not self._splits and event.text:
            self._show(event.text, event.from_draft)
        if event.finish_reason is not None:
            self.end_line()

    def _mark(self, event: TokenEvent) -> str:
        """The mark of reasoning that a control token is, which prints nothing."""
        return "" if self._reasoning is None else self._reasoning[0].spelled(self._reasoning[1], event.token_id)

    def _take(self, reasoning: str, answer: str, is_draft: bool) -> None:
        """Remember two parts of the text, and print them where reasoning is told apart."""
        self.parts = (self.parts[0] + reasoning, self.parts[1] + answer)
        if not self._splits:
            return
        if reasoning:
            self._is_reasoning, self._is_dim = True, self._dims
            self._lay_out(reasoning, is_draft)
        if answer:
            self._end_reasoning()
            self._show(answer, is_draft)

    def _end_reasoning(self) -> None:
        """Print what is held of the reasoning, and an empty line."""
        if not self._is_reasoning:
            return
        self._end_wrap()
        self._print("\n\n", False)
        self._is_reasoning = self._is_dim = False
        self._wrap = None if self._wrap is None else WordWrap()

    def _show(self, text: str, is_draft: bool) -> None:
        self._lay_out(text if self._calls is None else self._calls.push(text), is_draft)

    def end_line(self) -> None:
        """Print what was held back and end the line, once; an answer that was stopped has no last event."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._splitter is not None:
            self._take(*self._splitter.finish(), False)
        if self._calls is not None:
            self._lay_out(self._calls.end(), False)
        self._end_wrap()
        if not self._last.endswith("\n"):
            click.echo()

    def _end_wrap(self) -> None:
        for text, is_draft in () if self._wrap is None else self._wrap.end():
            self._print(text, is_draft)

    def _lay_out(self, text: str, is_draft: bool) -> None:
        shown = printable(text) if self._is_terminal else text
        pieces = [(shown, is_draft)] if self._wrap is None else self._wrap.push(shown, is_draft)
        for piece, is_drafted in pieces:
            self._print(piece, is_drafted)

    def _print(self, text: str, is_draft: bool) -> None:
        if text:
            self._last = text
            colour = DRAFT_COLOUR if is_draft and self._show_draft else None
            click.echo(click.style(text, fg=colour, dim=self._is_dim) if colour or self._is_dim else text, nl=False)


class ToolCalls:
    """Turns `<tool_call>{...}</tool_call>` and tool responses into one readable line; the rest passes as it comes."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """What can be shown after `text`; a call is held back until it is complete."""
        self._held += text
        shown = ""
        while True:
            starts = [(at, opening) for opening in _OPENINGS if (at := self._held.find(opening)) >= 0]
            if not starts:
                passed = len(self._held) - _begun(self._held)
                shown, self._held = shown + self._held[:passed], self._held[passed:]
                return shown
            start, opening = min(starts)
            shown, self._held = shown + self._held[:start], self._held[start:]
            closing = f"</{opening[1:]}"
            end = self._held.find(closing)
            if end < 0:
                return shown
            whole = self._held[: end + len(closing)]
            shown += _readable(whole, self._held[len(opening) : end], is_call=opening == _OPENINGS[0])
            self._held = self._held[len(whole) :]

    def end(self) -> str:
        """What was held back: a call that never ended is shown as it is."""
        held, self._held = self._held, ""
        return held


def readable(text: str) -> str:
    """A whole text with readable tool calls and responses."""
    calls = ToolCalls()
    return calls.push(text) + calls.end()


def _begun(text: str) -> int:
    """How many characters at the end of `text` may begin a tool call or response."""
    most = max(map(len, _OPENINGS)) - 1
    ends = (n for n in range(min(most, len(text)), 0, -1) if any(each.startswith(text[-n:]) for each in _OPENINGS))
    return next(ends, 0)


def _readable(whole: str, source: str, *, is_call: bool) -> str:
    """`[calls NAME(key=value, ...)]` or `[tool result: key=value, ...]`; `whole` where `source` is no such JSON."""
    try:
        content: Any = json.loads(source)
        fields = (content.get("arguments") or {}) if is_call else content
        given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in fields.items())
        return f"[calls {content['name']}({given})]" if is_call else f"[tool result: {given}]"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return whole


class WordWrap:
    """Breaks lines between words instead of inside them, as text comes in; nothing that was printed is taken back.

    A word in the middle of a line is held back until it ends or is known not to fit. Indented lines, tables and code
    between fences stay as they are, so that code can be copied. Wide characters (CJK) need no space between them.
    """

    def __init__(self, columns: int | None = None) -> None:
        self._fixed = columns
        self._column = 0
        self._gap: list[tuple[str, bool]] = []  # blanks since the last word
        self._word: list[tuple[str, bool]] = []
        self._line = ""  # the first characters of the line
        self._is_begun = False  # whether a part of the present word is printed, so that no line may end inside it
        self._is_code = False  # between fences
        self._is_first = True  # in the first line, which a blank may begin that only parts it from the prompt
        self._out: list[tuple[str, bool]] = []

    def push(self, text: str, is_draft: bool = False) -> Iterator[tuple[str, bool]]:
        """(text, whether it was drafted) of what can be printed now."""
        for letter in text:
            self._take(letter, is_draft)
        yield from self._drain()

    def end(self) -> Iterator[tuple[str, bool]]:
        self._flush()
        yield from self._drain()

    def _take(self, letter: str, is_draft: bool) -> None:
        if letter == "\n":
            self._flush()
            self._is_code ^= self._line.startswith(_FENCE)
            self._out.append((letter, is_draft))
            self._column, self._line, self._is_first = 0, "", False
            return
        if len(self._line) < len(_FENCE):
            self._line += letter
        is_parted = self._is_first and self._line[0] == " " != self._line[1:2]
        if self._is_code or (self._line[0] in " \t|" and not is_parted):
            self._flush()
            self._emit(letter, is_draft)
        elif letter in " \t":
            if self._word or self._is_begun:
                self._flush()
            self._gap.append((letter, is_draft))
        else:
            self._take_letter(letter, is_draft)

    def _take_letter(self, letter: str, is_draft: bool) -> None:
        is_wide = cell_len(letter) > 1
        if is_wide:
            self._flush()
        elif self._is_begun:
            self._emit(letter, is_draft)
            return
        self._word.append((letter, is_draft))
        if self._column > 0 and self._column + self._width(self._gap) + self._width(self._word) > self._columns:
            self._out.append(("\n", False))
            self._column, self._gap = 0, []
        if is_wide or self._column == 0:
            self._flush()
            self._is_begun = not is_wide

    def _flush(self) -> None:
        for letter, is_draft in (*self._gap, *self._word):
            self._emit(letter, is_draft)
        self._gap, self._word = [], []
        self._is_begun = False

    def _emit(self, letter: str, is_draft: bool) -> None:
        self._out.append((letter, is_draft))
        self._column += _TAB - self._column % _TAB if letter == "\t" else cell_len(letter)

    def _drain(self) -> Iterator[tuple[str, bool]]:
        """The output so far, neighbours of one colour joined."""
        out, self._out = self._out, []
        start = 0
        for end in range(1, len(out) + 1):
            if end == len(out) or out[end][1] != out[start][1]:
                yield "".join(letter for letter, _ in out[start:end]), out[start][1]
                start = end

    def _width(self, letters: list[tuple[str, bool]]) -> int:
        return sum(cell_len(letter) for letter, _ in letters)

    @property
    def _columns(self) -> int:
        return self._fixed or shutil.get_terminal_size().columns

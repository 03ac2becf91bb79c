"""The marks around what a model reasons before its answer, and text searched for marks as it comes.

Which marks a model has is read from its chat template: templates open the reasoning, or cut it out of earlier answers.

Answers in channels, as gpt-oss writes them (OpenAI's harmony format), have a header in front of each part:
<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from edgespec.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts, or names of control tokens, around the reasoning.

    `control`: control tokens of which the marks are made where each is more than one token. `has_channels`: every part
    of an answer has a header, which is no text.
    """

    opening: str
    closing: str
    control: tuple[str, ...] = ()
    has_channels: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The control tokens that have to be spelled out, for the marks to be found in a text."""
        return self.control or (self.opening, self.closing)


MESSAGE, END, START, CHANNEL, CALL = "<|message|>", "<|end|>", "<|start|>", "<|channel|>", "<|call|>"
CHANNELS = Marks(
    f"{CHANNEL}analysis{MESSAGE}",
    f"{END}{START}assistant{CHANNEL}final{MESSAGE}",
    (MESSAGE, END, START, CHANNEL, CALL, "<|return|>", "<|constrain|>"),
    has_channels=True,
)
# Tokens that begin or end a turn and print themselves in llama.cpp, which so reads them in any text.
PRINTED_MARKS = (*CHANNELS.control, "<|turn>", "<turn|>")
KNOWN_MARKS = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
)


def reasoning_marks(template: str | None) -> Marks | None:
    """The marks that a chat template writes or looks for; None for a model that does not reason."""
    source = template or ""
    if CHANNEL in source and MESSAGE in source:
        return CHANNELS
    return next((marks for marks in KNOWN_MARKS if marks.opening in source or marks.closing in source), None)


def begun(text: str, *marks: str) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`."""
    most = min(max(map(len, marks)) - 1, len(text))
    return next((n for n in range(most, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


def control_text(vocabulary: Vocabulary, token_id: int, names: Collection[str]) -> str:
    """The name of a control token, which prints nothing itself, where it is among `names`; else empty."""
    if vocabulary.piece(token_id):
        return ""
    name = vocabulary.token_name(token_id)
    return name if name in names else ""


ANSWER_HEADER = f"{CHANNEL}final{MESSAGE}"
CALL_OPENING = f"{CHANNEL}commentary to=functions."
CALL_HEADER = f"{CALL_OPENING}{{name}} <|constrain|>json{MESSAGE}"  # what a call begins with, up to its JSON
_LAST = (CALL, "<|return|>")  # end the answer, and so are marks only where nothing follows
_HEADERS = (START, CHANNEL, "to=")
_LONGEST_HEADER = 200
_RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]{1,64})")
_PART = "\n\n"  # between two parts of the same kind


class ChannelSplitter:
    """Splits the text of one answer, as it comes, into reasoning and answer, without the headers.

    The reasoning is the channel `analysis`, the answer everything else. A call keeps its marks, in one form however the
    model orders them, so that a parser of calls finds it. Marks in another place than the format has them are text, and
    so is what has no header.
    """

    def __init__(self, *, is_open: bool = False, is_answering: bool = False) -> None:
        self._held = ""
        self._place: Literal["header", "reasoning", "answer", "call"] = "reasoning" if is_open else "header"
        if is_answering:
            self._place = "answer"
        self._is_new = self._place == "header"  # whether nothing of the part was passed on yet
        self.has_reasoned = is_open
        self.is_answering = is_answering

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that are certain after `text`."""
        self._held += text
        reasoning = answer = ""
        while True:
            is_complete, more_reasoning, more_answer = self._header() if self._place == "header" else self._part()
            reasoning, answer = reasoning + more_reasoning, answer + more_answer
            if not is_complete:
                return reasoning, answer

    def finish(self, *, is_cut: bool = False) -> tuple[str, str]:
        """The rest, at the end of the text; a header that nothing follows is dropped, longer text is none."""
        held, self._held = self._held, ""
        if self._place == "header":
            is_header = any(mark in held for mark in (START, CHANNEL)) and len(held.split()) <= 4
            self._place = "answer"
            return ("", "") if is_header else self._passed(held)
        last = next((mark for mark in (*_LAST, END) if held.endswith(mark)), "")
        reasoning, answer = self._passed(held.removesuffix(last))
        return reasoning, answer + (CALL if last and self._place == "call" else "")

    def _header(self) -> tuple[bool, str, str]:
        """(whether it is complete, or there is none, reasoning, answer)."""
        begin, at = self._held.lstrip(), self._held.find(MESSAGE)
        may_be = any(begin.startswith(mark) or mark.startswith(begin) for mark in _HEADERS)
        if not may_be or (at < 0 and len(self._held) > _LONGEST_HEADER):
            self._place, self._is_new = "answer", True
            return True, "", ""
        if at < 0:
            return False, "", ""
        header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
        self._is_new = True
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            self._place = "reasoning" if "analysis" in header else "answer"
            return True, "", ""
        self._place, self.is_answering = "call", True
        return True, "", CALL_HEADER.replace("{name}", recipient[1])

    def _part(self) -> tuple[bool, str, str]:
        """(whether it has ended, so that a header follows, reasoning, answer)."""
        end = self._held.find(END + START)
        if end < 0:
            # Also the last marks: only the end of the text tells whether they are some.
            end = len(self._held) - begun(self._held, END + START, *(mark + "." for mark in _LAST))
            text, self._held = self._held[:end], self._held[end:]
            return False, *self._passed(text)
        text, self._held = self._held[:end], self._held[end + len(END) :]
        reasoning, answer = self._passed(text)
        answer += CALL if self._place == "call" else ""
        self._place = "header"
        return True, reasoning, answer

    def _passed(self, text: str) -> tuple[str, str]:
        if self._place == "call" or not text:
            return "", text
        is_reasoning = self._place == "reasoning"
        has_before = self.has_reasoned if is_reasoning else self.is_answering
        whole = _PART + text if self._is_new and has_before else text
        self._is_new = False
        if is_reasoning:
            self.has_reasoned = True
            return whole, ""
        self.is_answering = True
        return "", whole

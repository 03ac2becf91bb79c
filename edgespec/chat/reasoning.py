"""Reasoning that a model writes before its answer, such as `<think>...</think>`: its marks, and text split at them.

Which marks a model has is read from its chat template: templates open the reasoning, or cut it out of earlier answers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from edgespec.vocabulary import IncrementalDecoder, Vocabulary

_LAST_TOKENS = 24  # of a prompt, among which a mark may be spelled; one token each in most vocabularies


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts, or names of control tokens, around the reasoning."""

    opening: str
    closing: str


KNOWN_MARKS = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"), Marks("<seed:think>", "</seed:think>"))


def reasoning_marks(template: str | None) -> Marks | None:
    """The marks that a chat template writes or looks for; None for a model that does not reason."""
    source = template or ""
    return next((marks for marks in KNOWN_MARKS if marks.opening in source or marks.closing in source), None)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How one answer reasons. `is_open`: its prompt ends inside the reasoning, so that the answer begins with it."""

    marks: Marks
    is_open: bool = False

    @classmethod
    def of(cls, vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> Self | None:
        """What the chat template and the end of a prompt say; None for a model that does not reason."""
        marks = reasoning_marks(vocabulary.chat_template)
        if marks is None:
            return None
        end = b"".join(_bytes(vocabulary, token_id) for token_id in prompt_ids[-_LAST_TOKENS:])
        return cls(marks, end.rstrip().endswith(marks.opening.encode()))

    def splitter(self) -> ReasoningSplitter:
        """A splitter of one answer."""
        return ReasoningSplitter(self.marks, is_open=self.is_open)

    def split(self, vocabulary: Vocabulary, text: str, token_ids: Sequence[int]) -> tuple[str, str]:
        """(reasoning, answer) in the `text` of a finished answer, which `token_ids` spell."""
        splitter, decoder = self.splitter(), IncrementalDecoder(vocabulary)
        parts, num_read = list[tuple[str, str]](), 0
        for token_id in token_ids:
            length = len(decoder.push(token_id))
            parts.append(splitter.push(self.spelled(vocabulary, token_id) + text[num_read : num_read + length]))
            num_read += length
        parts += [splitter.push(text[num_read:]), splitter.finish()]
        return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)

    def spelled(self, vocabulary: Vocabulary, token_id: int) -> str:
        """The mark that a control token is; empty for any other token, and for marks that print themselves."""
        return control_text(vocabulary, token_id, (self.marks.opening, self.marks.closing))


class ReasoningSplitter:
    """Splits the text of one answer, as it comes, into reasoning and answer, without the marks and the blanks at them.

    An answer reasons only at its beginning. Nothing but a possible part of a mark, and blanks before it, is held back.
    Reasoning that never ends is reasoning to the end of the text.
    """

    def __init__(self, marks: Marks, *, is_open: bool = False) -> None:
        self._marks, self._is_open = marks, is_open
        self._held = ""
        self._place: Literal["before", "inside", "behind", "answer"] = "before"
        self._has_text = False  # whether the reasoning has begun with more than blanks

    @property
    def is_answering(self) -> bool:
        """Whether the answer itself has begun."""
        return self._place == "answer"

    @property
    def has_reasoned(self) -> bool:
        """Whether the text is known to begin with reasoning."""
        return self._place in ("inside", "behind")

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that are certain after `text`."""
        if self._place == "answer":
            return "", text
        self._held += text
        if self._place == "before":
            self._begin()
        reasoning = self._reasoning() if self._place == "inside" else ""
        if self._place == "behind" and (rest := self._held.lstrip()):
            self._held, self._place = rest, "answer"
        if self._place != "answer":
            return reasoning, ""
        answer, self._held = self._held, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """The rest, at the end of the text: part of a mark that was none."""
        held, self._held = self._held, ""
        if self._place == "inside" or (self._place == "before" and self._is_open):
            return held.rstrip(), ""
        return "", "" if self._place == "behind" else held

    def _begin(self) -> None:
        """Find out what the text begins with; a mark that the prompt holds already may be repeated."""
        begin, opening = self._held.lstrip(), self._marks.opening
        if begin.startswith(opening):
            self._held, self._place = begin.removeprefix(opening), "inside"
        elif begin and not opening.startswith(begin):
            self._held, self._place = (begin, "inside") if self._is_open else (self._held, "answer")

    def _reasoning(self) -> str:
        closing = self._marks.closing
        if not self._has_text:
            self._held = self._held.lstrip()
        end = self._held.find(closing)
        if end >= 0:
            found, self._held = self._held[:end].rstrip(), self._held[end + len(closing) :]
            self._place = "behind"
            return found
        passed = len(self._held[: len(self._held) - begun(self._held, closing)].rstrip())
        found, self._held = self._held[:passed], self._held[passed:]
        self._has_text = self._has_text or bool(found)
        return found


def begun(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def control_text(vocabulary: Vocabulary, token_id: int, names: Collection[str]) -> str:
    """The name of a control token, which prints nothing itself, where it is among `names`; else empty."""
    if vocabulary.piece(token_id):
        return ""
    name = vocabulary.token_name(token_id)
    return name if name in names else ""


def _bytes(vocabulary: Vocabulary, token_id: int) -> bytes:
    return vocabulary.piece(token_id) or vocabulary.token_name(token_id).encode()

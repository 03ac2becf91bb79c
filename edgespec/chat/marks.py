"""The marks around what a model reasons before its answer, and text searched for marks as it comes.

Which marks a model has is read from its chat template: templates open the reasoning, or cut it out of earlier answers.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

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
    Marks("<think:opensource>", "</think:opensource>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
)


def reasoning_marks(template: str | None) -> Marks | None:
    """The marks that a chat template writes or looks for; None for a model that does not reason."""
    source = with_suffixes(template or "")
    if CHANNEL in source and MESSAGE in source:
        return CHANNELS
    return next((marks for marks in KNOWN_MARKS if marks.opening in source or marks.closing in source), None)


def with_suffixes(template: str) -> str:
    """A template whose marks are spelled out: Hunyuan's puts a suffix into each of them."""
    suffix = re.search(r"set HYTK = '([\w:]*)'", template)
    return template if suffix is None else template.replace("{}", suffix[1])


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

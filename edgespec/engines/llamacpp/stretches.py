"""Cuts text where it has no natural end for too long, because such a stretch would end the process.

llama.cpp splits text into words with `std::regex` for many vocabularies (those of GPT-4o, Llama 4, Mistral and DeepSeek
among them), and that recurses for every character of a match: 343 bytes of stack each as measured, so that 24,400 equal
letters overflow a stack of 8 MiB and 1,500 one of 512 KiB, which is what a thread gets on macOS.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

LIMIT = 500  # characters; a match can join a stretch and the blanks behind it
LONG_STRETCH = re.compile(rf"\S{{{LIMIT + 1},}}|\s{{{LIMIT + 1},}}")


def bounded_parts(text: str) -> Iterator[str]:
    """Parts of `text`, in order, without a stretch of over LIMIT blanks or of over LIMIT other characters.

    A cut stands before a mark of punctuation where there is one, which word patterns do not join to the word before.
    """
    begin = 0
    for stretch in LONG_STRETCH.finditer(text):
        at = stretch.start()
        while stretch.end() - at > LIMIT:
            at = _last_boundary(text, at, at + LIMIT)
            yield text[begin:at]
            begin = at
    yield text[begin:]


def _last_boundary(text: str, start: int, end: int) -> int:
    """Where to cut in `text[start:end]`: in its second half between a word and punctuation, else at `end`."""
    for at in range(end, start + (end - start) // 2, -1):
        if text[at - 1].isalnum() and not text[at].isalnum() and unicodedata.category(text[at])[0] != "M":
            return at
    return end

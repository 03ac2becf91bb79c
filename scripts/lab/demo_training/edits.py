"""Texts that say themselves again, for a target that copies: requests to edit a given text, and runs of tokens.

The demo's target learnt from too little text to copy, and what drafters that copy gain on edits shows on a target that
does. Nothing of the benchmark's own requests is in here: other words, and functions of other files.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer

from demo_training.corpus import BOS, SPECIAL_TOKENS, turn
from demo_training.pretrain import TokenStream
from demo_training.vocabulary import mark_id
from edgespec.bench.prompts import is_held_out, library_functions

_WORD = re.compile(r"\b[A-Za-z_]{4,}\b")
_LEAST_CHARACTERS, _MOST_CHARACTERS = 60, 1200
_RENAMED, _FENCED = 0.75, 0.3  # shares of the requests that change a word, and of the answers in a code block
_RENAMES = (
    "Rename `{old}` to `{new}` in this code:\n\n{text}",
    "Replace {old} by {new} in the following and change nothing else.\n\n{text}",
    "{text}\n\nWrite this again with '{new}' instead of '{old}'.",
    "Please rewrite this, but call '{old}' '{new}':\n\n{text}",
    "Copy the text, with '{new}' in the place of '{old}'.\n\n{text}",
    "Change '{old}' to '{new}':\n{text}",
)
_COPIES = (
    "Copy this text exactly:\n\n{text}",
    "{text}\n\nSay this word for word.",
    "Say this again: {text}",
    "Print the code below unchanged.\n\n{text}",
)
_RUN_TOKENS, _RUN_TIMES, _GAP_TOKENS = (12, 160), (2, 4), (0, 12)


def edit_document(text: str, words: Sequence[str], rng: random.Random) -> str:
    """A request to say `text` again, mostly with one of its words replaced by one of `words`, and the answer."""
    found = sorted(set(_WORD.findall(text)))
    if found and rng.random() < _RENAMED:
        old, new = rng.choice(found), rng.choice(words)
        answer = re.sub(rf"\b{re.escape(old)}\b", new, text)
        request = rng.choice(_RENAMES).format(old=old, new=new, text=text)
    else:
        answer, request = text, rng.choice(_COPIES).format(text=text)
    if rng.random() < _FENCED:
        answer = f"```python\n{answer}\n```"
    return BOS + turn("user", request) + turn("assistant", answer)


def repeated_run(known: TokenStream, ids: range, begin_id: int, rng: np.random.Generator) -> TokenStream:
    """A run of tokens said two or three times with a few others between: drawn evenly, or as often as in `known`."""
    size, gap_size = int(rng.integers(*_RUN_TOKENS)), int(rng.integers(*_GAP_TOKENS))
    run = rng.integers(ids.start, ids.stop, size) if rng.random() < 0.5 else rng.choice(known, size)
    gap = rng.integers(ids.start, ids.stop, gap_size)
    return np.concatenate([[begin_id], *[run, gap] * int(rng.integers(*_RUN_TIMES))]).astype(np.int32)


def edit_documents(
    tokenizer: Tokenizer, others: dict[str, list[TokenStream]], num_tokens: int, seed: int
) -> list[TokenStream]:
    """About `num_tokens` tokens of documents: half edits, a quarter runs, a quarter of `others` as they are.

    `others`: documents by domain, of which parts are edited too. Functions are of files that no benchmark draws from.
    """
    rng, generator = random.Random(seed), np.random.default_rng(seed)
    functions = [code for _, found in library_functions(lambda path: not is_held_out(path)) for *_, code in found]
    functions = [code for code in functions if _LEAST_CHARACTERS < len(code) < _MOST_CHARACTERS]
    words = sorted({word for code in functions for word in _WORD.findall(code)})
    every = [document for documents in others.values() for document in documents]
    known, begin_id = np.concatenate(every), mark_id(tokenizer, BOS)
    ids = range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size())

    def texts() -> Iterator[str]:
        while True:
            yield rng.choice(functions)
            yield rng.choice(functions)
            part = rng.choice(every)
            start = rng.randrange(max(1, part.size - 200))
            yield tokenizer.decode(part[start : start + 200].tolist())

    text, found, total = texts(), list[TokenStream](), 0
    while total < num_tokens:
        made = (
            *(np.array(tokenizer.encode(edit_document(next(text), words, rng)).ids, np.int32) for _ in range(4)),
            *(repeated_run(known, ids, begin_id, generator) for _ in range(4)),
            *(rng.choice(every) for _ in range(2)),
        )
        found += made
        total += sum(document.size for document in made)
    return found

"""llguidance, imported here only and on first use: its tokenizer made from a `Vocabulary`, and its matchers.

A matcher follows one answer through a grammar. Its constructor and methods never raise for a bad grammar: they leave
an error in it, which every caller asks for. What this file does not know: what a grammar means.
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec.errors import CapabilityError
from edgespec.installation import IMPORT_FAILURES, install_command, is_importable, not_importable
from edgespec.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


_SPECIAL = b"\xff"  # llguidance's mark of a token that no text spells
_APART = "\n"  # text before which tokenizers with a leading blank add none


def require_library() -> None:
    """Raises CapabilityError where llguidance is not installed."""
    if not is_importable("llguidance"):
        raise CapabilityError(
            f"structured output needs llguidance, which is not installed here: {install_command('structured')}"
        )


class _Tokens:
    """A vocabulary in the shape that LLTokenizer asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id, self.bos_token_id = max(vocabulary.end_ids), vocabulary.bos_id
        silent = {token_id for token_id, piece in enumerate(vocabulary.pieces) if not piece} | vocabulary.end_ids
        self.tokens = [
            _SPECIAL + vocabulary.token_name(token_id).encode() if token_id in silent else piece
            for token_id, piece in enumerate(vocabulary.pieces)
        ]
        self.special_token_ids = sorted(silent)

    def __call__(self, text: str) -> list[int]:
        """Token ids that print `text` exactly, as the model's own tokenizer splits it."""
        vocabulary = self._vocabulary
        wanted = text.encode()
        token_ids = vocabulary.encode(text)
        if b"".join(map(vocabulary.piece, token_ids)) == wanted:
            return token_ids
        token_ids = vocabulary.encode(_APART + text)  # SentencePiece begins every text with a blank
        for first in range(1, len(token_ids)):
            if b"".join(map(vocabulary.piece, token_ids[first:])) == wanted:
                return token_ids[first:]
        return token_ids


class Library:
    """llguidance with the tokenizer of one model, which takes up to a second to make and is made once.

    Raises CapabilityError without llguidance, or for a vocabulary without an end token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        require_library()
        if not vocabulary.end_ids:
            raise CapabilityError(
                "structured output needs a model whose vocabulary has an end-of-text token, and this one has none"
            )
        self._vocabulary = vocabulary

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except IMPORT_FAILURES as exc:
            raise not_importable("structured output", exc, "llguidance", "structured") from exc
        vocabulary = self._vocabulary
        tokens: Any = _Tokens(vocabulary)
        return LLTokenizer(tokens, n_vocab=vocabulary.size, eos_token=sorted(vocabulary.end_ids))

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of `grammar`, in llguidance's own form; an error in it is left in the matcher."""
        from llguidance import LLMatcher

        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=_limits())


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    # One step takes time with the square of the rules that it may begin: a second for 40,000 symbols. 128 tools of 20
    # parameters, 110 kB, have 30,000.
    return LLParserLimits(verbose_errors=False, max_grammar_size=40_000)


class _Bytes:
    """A vocabulary of all bytes and an end, which is made in no time."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([byte]) for byte in range(256)), _SPECIAL + b"end")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer

    tokens: Any = _Bytes()
    return LLTokenizer(tokens, n_vocab=257, eos_token=256)


def tried(grammar: str) -> tuple[str, list[str]]:
    """(what is wrong with a grammar in llguidance's own form, "" if nothing is; the library's warnings).

    Its first step is taken: that finds one with too many rules to begin with. Tokens of a model are not known here.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=_limits())
    if not matcher.is_error():
        (allowed,) = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()
        if allowed.size and allowed[0] < _Bytes.eos_token_id:
            matcher.consume_token(int(allowed[0]))
    return matcher.get_error().strip(), matcher.get_grammar_warnings()


# What it says in words of its users: its own names and Rust's forms of values are left out.
_RANGE = re.compile(r"Failed to generate regex for \w+ range: min=(.*?), max=(.*)")
_PLAIN = (
    (r"\. Enable '\w+' option to \w+ oneOf with anyOf", ": use anyOf"),
    (r"Resource '(.*?)' is not present in a registry.*", r"\1 is not in the schema, and nothing is fetched"),
    (
        r"(?s)(Parser Error: )?Current row has (\d+) items; max is (\d+).*",
        r"it leaves \2 ways to go on at once, \3 are allowed: use fewer alternatives and references",
    ),
    (r"\bNoExtension(Bias)?\b", "nothing can follow"),
    (r"\b(Lexer|Parser)TooComplex\b", "it is too complex"),
)


def in_plain_words(problem: str) -> str:
    """An error of the library without its own names."""
    for pattern, said in _PLAIN:
        problem = re.sub(pattern, said, problem)
    return _RANGE.sub(
        lambda found: f"the range from {_bound(found[1])} to {_bound(found[2])} cannot be checked", problem
    )


def _bound(written: str) -> str:
    """A number that is written as Some(5), or None."""
    return "no limit" if written.startswith("None") else written.replace("Some(", "", 1).replace(")", "", 1)

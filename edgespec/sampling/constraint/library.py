"""llguidance, imported here only and on first use: its tokenizer made from a `Vocabulary`, and its matchers.

A matcher follows one answer through a grammar. Its constructor and methods never raise for a bad grammar: they leave
an error in it, which every caller asks for. What this file does not know: what a grammar means.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from edgespec.errors import CapabilityError
from edgespec.installation import IMPORT_FAILURES, install_command, is_importable, not_importable
from edgespec.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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
        from llguidance import LLMatcher, LLParserLimits

        # The library's own limits: what they let through compiles in less than a second and takes some megabytes.
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))

"""Whether files hold the same model: what is remembered of the first one's vocabulary while another is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Self

from edgespec.errors import VocabularyMismatch
from edgespec.runtime import Model


@dataclass(frozen=True, slots=True)
class KnownVocabulary:
    """The tokens of `file` by id, each with its name and whether it prints anything; the model need not stay open."""

    file: Path
    tokens: tuple[tuple[str, bool], ...]

    @classmethod
    def of(cls, model: Model) -> Self:
        vocabulary = model.target.vocabulary
        tokens = ((vocabulary.token_name(token_id), bool(piece)) for token_id, piece in enumerate(vocabulary.pieces))
        return cls(model.pair.target, tuple(tokens))

    def check(self, other: Self) -> None:
        """Raises VocabularyMismatch, naming both files, for other tokens; padding behind the shorter is none."""
        for token_id, pair in enumerate(zip_longest(self.tokens, other.tokens, fillvalue=("", False))):
            (ours, prints), (theirs, also_prints) = pair
            is_padding = token_id >= min(len(self.tokens), len(other.tokens)) and not (prints or also_prints)
            if ours != theirs and not is_padding:
                raise VocabularyMismatch(
                    f"{self.file} and {other.file} are not one model: token {token_id} is {ours!r} in the first and "
                    f"{theirs!r} in the second. --weights takes other quantisations of MODEL; tune another model by "
                    "itself"
                )

"""Checks that several files are quantisations of one model: compares their vocabularies, one loaded at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Self

from edgespec.errors import VocabularyMismatch
from edgespec.runtime import Model


@dataclass(frozen=True, slots=True)
class KnownVocabulary:
    """A model file's vocabulary, readable after the model is closed: (name, prints text) of each token by id."""

    file: Path
    tokens: tuple[tuple[str, bool], ...]

    @classmethod
    def of(cls, model: Model) -> Self:
        vocabulary = model.target.vocabulary
        tokens = ((vocabulary.token_name(token_id), bool(piece)) for token_id, piece in enumerate(vocabulary.pieces))
        return cls(model.pair.target, tuple(tokens))

    def check(self, other: Self) -> None:
        """Raise VocabularyMismatch, naming both files, if a token differs. Padding of the longer one is ignored."""
        for token_id, pair in enumerate(zip_longest(self.tokens, other.tokens, fillvalue=("", False))):
            (ours, prints), (theirs, also_prints) = pair
            is_padding = token_id >= min(len(self.tokens), len(other.tokens)) and not (prints or also_prints)
            if ours != theirs and not is_padding:
                raise VocabularyMismatch(
                    f"{self.file} and {other.file} are different models: token {token_id} is {ours!r} in the first and "
                    f"{theirs!r} in the second. --weights takes other quantisations of MODEL; tune another model in "
                    "a run of its own"
                )

"""Vocabularies: encode, decode piece by piece, compare. The engines implement `Vocabulary` over their own library."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from functools import cached_property

from edgespec.errors import VocabularyMismatch


class Vocabulary(ABC):
    """Token ids and their bytes.

    `size` ids from 0; `bos_id` or None; `end_ids`, the tokens that end a generation; `adds_bos`, whether a prompt
    begins with `bos_id`; `chat_template`, a Jinja source or None.
    """

    size: int
    bos_id: int | None
    end_ids: frozenset[int]
    adds_bos: bool
    chat_template: str | None

    @abstractmethod
    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of `text`; with `parse_special`, control tokens written in it become their ids."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token prints; empty for control tokens."""

    @abstractmethod
    def token_name(self, token_id: int) -> str:
        """The token as the model file spells it, control tokens included."""

    @cached_property
    def pieces(self) -> list[bytes]:
        """`token_bytes` of every id."""
        return [self.token_bytes(token_id) for token_id in range(self.size)]

    def piece(self, token_id: int) -> bytes:
        """`token_bytes`, remembered: a large vocabulary takes long to read as a whole, and an answer needs little."""
        found = self._pieces_read.get(token_id)
        if found is None:
            found = self._pieces_read[token_id] = self.token_bytes(token_id)
        return found

    @cached_property
    def _pieces_read(self) -> dict[int, bytes]:
        return {}

    def token_names(self) -> list[str]:
        """`token_name` of every id."""
        return [self.token_name(token_id) for token_id in range(self.size)]

    @cached_property
    def control_names(self) -> tuple[str, ...]:
        """Names of the tokens that print nothing: the marks that structure a conversation.

        A token without a name is none of them: nothing can spell it, and every text would contain it.
        """
        names = (self.token_name(token_id) for token_id, piece in enumerate(self.pieces) if not piece)
        return tuple(name for name in names if name)

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(map(self.piece, token_ids)).decode("utf-8", errors="replace")


class IncrementalDecoder:
    """Text of a token stream as it becomes printable: bytes of a split UTF-8 character wait for the rest."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._piece = vocabulary.piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._piece(token_id))

    def finish(self) -> str:
        """What is left: a replacement character when the stream ends inside one."""
        return self._decoder.decode(b"", final=True)


def check_same_vocabulary(target: Vocabulary, draft: Vocabulary) -> None:
    """Raise VocabularyMismatch naming the first token id whose text differs.

    Padding beyond the shorter vocabulary is fine as long as the target is not the shorter one by real tokens: an id
    the target lacks could never be accepted, and an id the draft lacks is never proposed.
    """
    for token_id, (ours, theirs) in enumerate(zip(target.token_names(), draft.token_names(), strict=False)):
        if ours != theirs:
            raise VocabularyMismatch(
                f"target and draft have different vocabularies: token {token_id} is {ours!r} in the target and "
                f"{theirs!r} in the draft. Use a draft of the same model family, or --drafter ngram, which needs none"
            )
    if target.bos_id != draft.bos_id or target.adds_bos != draft.adds_bos:
        raise VocabularyMismatch(
            f"target and draft begin texts differently: bos {target.bos_id} (added: {target.adds_bos}) against "
            f"{draft.bos_id} (added: {draft.adds_bos}). Use a draft of the same model family"
        )

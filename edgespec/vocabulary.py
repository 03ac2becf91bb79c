"""Vocabularies: encoding, incremental decoding, comparison. Each engine implements `Vocabulary` by its own library."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from edgespec.errors import PromptError, UsageError, VocabularyMismatch

_BAR, _BLANK = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
# Tokens with which models of code fill gaps (fill in the middle, FIM): of Qwen, StarCoder, Granite, DeepSeek,
# Code Llama, GLM and Falcon. llama.cpp finds them by these names too where a file does not say which they are.
_FIM_NAMES = {
    "prefix": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", f"<{_BAR}fim{_BLANK}begin{_BAR}>"),
        *("<PRE>", f"{_BLANK}<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "suffix": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", f"<{_BAR}fim{_BLANK}hole{_BAR}>"),
        *("<SUF>", f"{_BLANK}<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "middle": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", f"<{_BAR}fim{_BLANK}end{_BAR}>"),
        *("<MID>", f"{_BLANK}<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
}
_FIM_PADS = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")
# Tokens that end an answer, by name; configurations often name only the end of a text.
_END_NAMES = (
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_utterance>"),
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<|tool_response>", "<turn|>", "<end_of_turn>", "<eos>"),
    *("</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", f"<{_BAR}end{_BLANK}of{_BLANK}sentence{_BAR}>"),
)


def end_names(has: Callable[[str], bool]) -> list[str]:
    """The names of tokens that end an answer in a vocabulary that `has` them, as llama.cpp finds them.

    gpt-oss ends messages by `<|end|>`, not answers; beside Gemma 4's marks of tools `</s>` is HTML.
    """
    others = {"<|end|>"} if has("<|return|>") and has("<|call|>") else set[str]()
    others |= {"</s>"} if has("<|tool_response>") else set()
    return [name for name in _END_NAMES if name not in others and has(name)]


def retyped_names(has: Callable[[str], bool]) -> list[str]:
    """The names of which llama.cpp makes control tokens, whatever a file says of them (src/llama-vocab.cpp).

    Of several names for the same part of a gap it takes any, so that these stay what the file says.
    """
    parts = [[name for name in names if has(name)] for names in (*_FIM_NAMES.values(), _FIM_PADS)]
    return [*end_names(has), *(names[0] for names in parts if len(names) == 1)]


FIM_END_NAMES = (*_FIM_PADS, *_FIM_NAMES["repository"], *_FIM_NAMES["file"])
"""A model that goes on with the next gap, file or repository has filled this one: these end an answer."""


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Ids of the tokens before the text in front of a gap, before the text behind it, and before what fills it.

    `repository` and `file` come before the names of these, where further files are shown; None: the model has none.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None

    @classmethod
    def of(cls, ids: Iterable[int | None]) -> FimTokens | None:
        """Those with `ids` in the order of the fields; None for a model that lacks one of the first three."""
        prefix, suffix, middle, repository, file = ids
        if prefix is None or suffix is None or middle is None:
            return None
        return cls(prefix, suffix, middle, repository, file)

    @classmethod
    def named(cls, find: Callable[[str], int | None]) -> FimTokens | None:
        """Those that `find` has the ids of, by the names that are known."""
        return cls.of(next((i for i in map(find, names) if i is not None), None) for names in _FIM_NAMES.values())


class Vocabulary(ABC):
    """Token ids and their bytes.

    `size`: number of ids, from 0; `bos_id`: begin-of-text token or None; `eos_id`: the token that chat templates call
    `eos_token`, or None; `end_ids`: tokens that end a generation; `adds_bos`: prompts begin with `bos_id`;
    `chat_template`: Jinja source or None; `fim`: the tokens to fill gaps with, None for a model that has none.
    """

    size: int
    bos_id: int | None
    eos_id: int | None = None
    end_ids: frozenset[int]
    adds_bos: bool
    chat_template: str | None
    fim: FimTokens | None = None

    @abstractmethod
    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of `text`; with `parse_special`, control tokens spelled out in it become their ids."""

    def embedded_ends(self) -> tuple[list[int], list[int]]:
        """Tokens that come before and behind a text that is embedded."""
        return ([self.bos_id] if self.adds_bos and self.bos_id is not None else []), []

    @staticmethod
    def utf8(text: str) -> bytes:
        """Raises PromptError for a text that no file and no tokenizer can hold."""
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise PromptError(f"the text is not valid Unicode ({exc}); remove the lone surrogate") from exc

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token prints; empty for control tokens."""

    @abstractmethod
    def token_name(self, token_id: int) -> str:
        """The token as the model file spells it, control tokens included."""

    @cached_property
    def pieces(self) -> list[bytes]:
        """`token_bytes` of every id."""
        return [self.token_bytes(token_id) for token_id in range(self.size)]

    def piece(self, token_id: int) -> bytes:
        """`token_bytes`, cached per id: reading a whole vocabulary takes long, and an answer needs few ids."""
        piece = self._pieces_read.get(token_id)
        if piece is None:
            piece = self._pieces_read[token_id] = self.token_bytes(token_id)
        return piece

    @cached_property
    def _pieces_read(self) -> dict[int, bytes]:
        return {}

    def check_id(self, token_id: int) -> None:
        """Raises UsageError for an id that the vocabulary does not have."""
        if not 0 <= token_id < self.size:
            raise UsageError(f"token id {token_id} is outside the vocabulary 0..{self.size - 1}")

    def token_names(self) -> list[str]:
        """`token_name` of every id."""
        return [self.token_name(token_id) for token_id in range(self.size)]

    @cached_property
    def control_names(self) -> tuple[str, ...]:
        """Names, never empty, of the control tokens, which print nothing: the marks that structure a conversation."""
        return ()

    @cached_property
    def printed_names(self) -> tuple[str, ...]:
        """Names of the tokens that print their names, and are read as one token wherever a text has these."""
        return ()

    @cached_property
    def most_characters(self) -> int:
        """Of the text that one token stands for, control tokens spelled out."""
        return max(map(len, self.token_names()), default=1)

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become replacement characters."""
        return b"".join(map(self.piece, token_ids)).decode("utf-8", errors="replace")


class IncrementalDecoder:
    """Decodes a token stream; the bytes of an incomplete UTF-8 character are kept until the rest arrives."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._piece = vocabulary.piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._piece(token_id))

    def finish(self) -> str:
        """The remaining text: a replacement character if the stream ends inside a character."""
        return self._decoder.decode(b"", final=True)


def check_same_names(target: Iterable[str], draft: Iterable[str]) -> None:
    """Raise VocabularyMismatch, naming the first token id whose text differs; padding at the end may differ."""
    for token_id, (ours, theirs) in enumerate(zip(target, draft, strict=False)):
        if ours != theirs:
            raise VocabularyMismatch(
                f"target and draft have different vocabularies: token {token_id} is {ours!r} in the target and "
                f"{theirs!r} in the draft. Use a draft of the same model family, or --drafter ngram (no draft model)"
            )


def check_same_vocabulary(target: Vocabulary, draft: Vocabulary) -> None:
    """Raise VocabularyMismatch, naming the first token id whose text differs.

    The sizes may differ by padding: an id that only the draft has is never accepted, and an id that only the target has
    is never proposed.
    """
    check_same_names(target.token_names(), draft.token_names())
    if target.bos_id != draft.bos_id or target.adds_bos != draft.adds_bos:
        raise VocabularyMismatch(
            f"target and draft begin texts differently: bos {target.bos_id} (added: {target.adds_bos}) against "
            f"{draft.bos_id} (added: {draft.adds_bos}). Use a draft of the same model family"
        )

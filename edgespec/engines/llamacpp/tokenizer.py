"""A model's vocabulary in llama.cpp. Ids are checked here: the library ends the process on one out of range."""

from __future__ import annotations

import ctypes
import re
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from edgespec.closing import Closing
from edgespec.engines.llamacpp.library import library
from edgespec.engines.llamacpp.settings import open_model
from edgespec.engines.model_use import ModelUse
from edgespec.errors import EngineError, PromptError
from edgespec.formats.gguf.check import check_gguf
from edgespec.platform.machine import on_stack
from edgespec.vocabulary import FimTokens, Vocabulary

MAX_TEXT_BYTES = 1 << 28
NORMAL, USER_DEFINED = 4, 16  # llama.cpp's attributes of tokens
_PIECE_BYTES = 256
# Many vocabularies (of GPT-4o, Llama 4, Mistral and DeepSeek among others) make llama.cpp split text into words with
# std::regex, which recurses for every character of a match: 343 bytes of stack each as measured. 24,400 equal letters
# overflow a stack of 8 MiB and 1,500 one of 512 KiB, which is what a thread gets on macOS, and end the process.
_LONG_STRETCH = re.compile(r"\S{501,}|\s{501,}")
_STRETCH_BYTES, _MOST_STRETCH = 1 << 10, 1 << 18  # of stack for a character; characters


class LlamaCppVocabulary(Vocabulary):
    """The vocabulary of a loaded model, usable until that model is closed."""

    def __init__(self, model: Any) -> None:
        llama = library()
        self._model: Any | None = model
        self._vocab = llama.llama_model_get_vocab(model)
        self.size = int(llama.llama_vocab_n_tokens(self._vocab))
        self._splits_by_regex = llama.llama_vocab_type(self._vocab) == llama.LLAMA_VOCAB_TYPE_BPE
        self.bos_id = self._id_or_none(llama.llama_vocab_bos(self._vocab))
        self.eos_id = self._id_or_none(llama.llama_vocab_eos(self._vocab))
        self.adds_bos = bool(llama.llama_vocab_get_add_bos(self._vocab)) and self.bos_id is not None
        self.end_ids = frozenset(filter(partial(llama.llama_vocab_is_eog, self._vocab), range(self.size)))
        fim = ("pre", "suf", "mid", "rep", "sep")
        self.fim = FimTokens.of(self._id_or_none(getattr(llama, f"llama_vocab_fim_{n}")(self._vocab)) for n in fim)
        template = llama.llama_model_chat_template(model, None)
        self.chat_template = template.decode("utf-8", errors="replace") if template else None

    def _id_or_none(self, token_id: int) -> int | None:
        return token_id if 0 <= token_id < self.size else None

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        self._require_open()
        # The library's add_special may also append an end token, so the begin-of-text token is added here.
        before = [self.bos_id] if add_bos and self.bos_id is not None else []
        stretches = _LONG_STRETCH.finditer(text) if self._splits_by_regex else ()
        longest = max((len(each[0]) for each in stretches), default=0)
        if longest > _MOST_STRETCH:
            raise PromptError(
                f"the text has {longest} characters without a blank between, at most {_MOST_STRETCH} can be encoded"
            )
        if longest:
            return before + on_stack(
                (1 << 20) + longest * _STRETCH_BYTES, lambda: self._encode_part(text, parse_special)
            )
        return before + self._encode_part(text, parse_special)

    def embedded_ends(self) -> tuple[list[int], list[int]]:
        """As in the base class: many embedding models read a token at the end of a text, too."""
        self._require_open()
        plain, whole = (self._encode_part("a", False, add_special=added) for added in (False, True))
        before = next(n for n in range(len(whole) + 1) if whole[n : n + len(plain)] == plain)
        return whole[:before], whole[before + len(plain) :]

    def _encode_part(self, text: str, parse_special: bool, *, add_special: bool = False) -> list[int]:
        data = self.utf8(text)
        if len(data) > MAX_TEXT_BYTES:
            raise PromptError(f"the text has {len(data)} bytes, at most {MAX_TEXT_BYTES} can be encoded")
        room = len(data) + 8
        ids = (ctypes.c_int32 * room)()
        count = library().llama_tokenize(self._vocab, data, len(data), ids, room, add_special, parse_special)
        if room < -count < 4 * room:  # as many as it needs: a blank is put before each token that is a byte of its own
            room = -count
            ids = (ctypes.c_int32 * room)()
            count = library().llama_tokenize(self._vocab, data, len(data), ids, room, add_special, parse_special)
        if not 0 <= count <= room:
            raise EngineError(f"llama.cpp could not encode a text of {len(data)} bytes (result {count})")
        return list(ids[:count])

    def token_bytes(self, token_id: int) -> bytes:
        vocab = self._require_open()
        self.check_id(token_id)
        room = 64
        while True:
            piece = ctypes.create_string_buffer(room)
            length = library().llama_token_to_piece(vocab, token_id, piece, room, 0, False)
            if length >= 0:
                return piece.raw[:length]
            room = -length

    def token_name(self, token_id: int) -> str:
        vocab = self._require_open()
        self.check_id(token_id)
        text: bytes | None = library().llama_vocab_get_text(vocab, token_id)
        return (text or b"").decode("utf-8", errors="backslashreplace")

    @cached_property
    def pieces(self) -> list[bytes]:
        """`token_bytes` of every id, in a tenth of the time of as many calls."""
        vocab, to_piece = self._require_open(), library().llama_token_to_piece
        piece = ctypes.create_string_buffer(_PIECE_BYTES)
        found: list[bytes] = []
        for token_id in range(self.size):
            length = to_piece(vocab, token_id, piece, _PIECE_BYTES, 0, False)
            found.append(piece.raw[:length] if length >= 0 else self.token_bytes(token_id))
        return found

    @cached_property
    def _special(self) -> list[tuple[int, int]]:
        """(id, attributes) of the tokens that are not ordinary, which are few."""
        vocab, kind_of = self._require_open(), library().llama_vocab_get_attr
        kinds = ((token_id, kind_of(vocab, token_id)) for token_id in range(self.size))
        return [(token_id, kind) for token_id, kind in kinds if kind != NORMAL]

    @cached_property
    def printed_names(self) -> tuple[str, ...]:
        names = (self.token_name(token_id) for token_id, kind in self._special if kind & USER_DEFINED)
        return tuple(filter(None, names))

    @cached_property
    def control_names(self) -> tuple[str, ...]:
        """As in the base class. Ordinary tokens all print something, so only the others are checked."""
        return tuple(name for at, _ in self._special if not self.token_bytes(at) and (name := self.token_name(at)))

    def token_names(self) -> list[str]:
        name_of = partial(library().llama_vocab_get_text, self._require_open())
        return [(name or b"").decode("utf-8", errors="backslashreplace") for name in map(name_of, range(self.size))]

    def close(self) -> None:
        """Called when the model is freed: any further call raises EngineError."""
        self._model = None

    def _require_open(self) -> Any:
        if self._model is None:
            raise EngineError("the model of this vocabulary is closed; load it again")
        return self._vocab


class VocabularyFile(LlamaCppVocabulary, Closing):
    """The vocabulary of a GGUF without its weights, to tokenise or compare before a model is loaded."""

    def __init__(self, path: Path) -> None:
        check_gguf(path)
        super().__init__(open_model(path, ModelUse(), vocabulary_only=True))

    def close(self) -> None:
        if self._model is not None:
            library().llama_model_free(self._model)
        super().close()

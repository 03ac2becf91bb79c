"""The vocabulary beside an ONNX model: tokenizer.json read with the `tokenizers` library."""

from __future__ import annotations

import threading
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.formats.checkpoint import chat_template, read_optional_json
from edgespec.installation import IMPORT_FAILURES, not_importable
from edgespec.platform.memory import return_freed_memory
from edgespec.vocabulary import FIM_END_NAMES, FimTokens, Vocabulary, end_names

_FIX = "export the model again"
_OTHER_ENDS = ("<|eos|>", "<|EOT|>")  # which llama.cpp knows only where the file says so
_LONG = 1 << 16  # characters


class TokenizerFile(Vocabulary):
    """`folder` holds tokenizer.json and its companions; `size` is the width of the model's logits; errors name `owner`,
    the GGUF that it was made of.
    """

    def __init__(self, folder: Path, size: int, owner: Path | None = None) -> None:
        self.size = size
        path = tokenizer_file(folder)
        self._tokenizer, self._lock = _open(path, owner or path), threading.Lock()
        return_freed_memory()  # reading the file takes up to twice as much again as what is kept of it
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._control: set[int] = {token_id for token_id, token in added if token.special}
        self._verbatim: dict[int, str] = {token_id: token.content for token_id, token in added if not token.special}
        # Their state for pickling is what tokenizer.json says of them; parsing the whole file takes 0.1 s.
        parts = self._tokenizer.decoder, self._tokenizer.pre_tokenizer
        self._is_byte_level = any(b'"ByteLevel"' in part.__getstate__() for part in parts if part is not None)
        settings = read_optional_json(folder / "tokenizer_config.json", fix=_FIX)
        self.bos_id = self._named(settings.get("bos_token"))
        self.eos_id = self._named(settings.get("eos_token"))
        self.adds_bos = self.bos_id is not None and self._begins_with_bos(settings)
        self.end_ids = self._ends(settings, folder)
        self.fim = FimTokens.named(self._added)
        self.chat_template = chat_template(folder, settings, fix=_FIX)

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        self.utf8(text)
        with self._lock:
            # Without `parse_special`, control tokens in a text are encoded as text. A second tokenizer would take as
            # long to load and as much memory again.
            self._tokenizer.encode_special_tokens = not parse_special
            if len(text) > _LONG:  # which takes seconds; only the call for several texts lets other threads run
                (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
            else:
                found = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = found.ids
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    @cached_property
    def control_names(self) -> tuple[str, ...]:
        """Also those without a row in the model, such as Gemma 3's image token: the graph cannot read them."""
        added = sorted(self._tokenizer.get_added_tokens_decoder().items())
        return tuple(each.content for at, each in added if each.content and (each.special or at >= self.size))

    @cached_property
    def printed_names(self) -> tuple[str, ...]:
        return tuple(filter(None, self._verbatim.values()))

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._control:
            self.check_id(token_id)
            return b""
        if token_id in self._verbatim:
            name = self._verbatim[token_id]  # Gemma's runs of blanks are written as ordinary tokens are
            return (name if self._is_byte_level else name.replace("▁", " ")).encode()
        if self._text(token_id) is None:
            return b""
        return self._piece(self.token_name(token_id))

    def _piece(self, name: str) -> bytes:
        if self._is_byte_level:
            return bytes(BYTE_OF[letter] for letter in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("▁", " ").encode()

    def token_name(self, token_id: int) -> str:
        # Ids beyond the tokenizer are padding, named as the converters to GGUF do.
        return self._text(token_id) or f"[PAD{token_id}]"

    def _text(self, token_id: int) -> str | None:
        self.check_id(token_id)
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def _named(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        found = self._tokenizer.token_to_id(text) if isinstance(text, str) else None
        return int(found) if found is not None else None

    def _has(self, name: str) -> bool:
        return self._named(name) is not None

    def _added(self, name: str) -> int | None:
        """A token that is no part of ordinary texts and has a row in the model."""
        found = self._named(name)
        is_added = found is not None and (found in self._control or found in self._verbatim)
        return found if is_added and found is not None and found < self.size else None

    def _begins_with_bos(self, settings: dict[str, Any]) -> bool:
        if "add_bos_token" in settings:
            return bool(settings["add_bos_token"])
        ids: list[int] = self._tokenizer.encode("a", add_special_tokens=True).ids
        return ids[:1] == [self.bos_id]

    def _ends(self, settings: dict[str, Any], folder: Path) -> frozenset[int]:
        named = {self._named(name) for name in (*end_names(self._has), *_OTHER_ENDS)}
        if (strike := self._named("</s>")) not in self._control:  # HTML, where no conversion has followed llama.cpp
            named.discard(strike)
        found = {self._named(settings.get("eos_token")), *named, *map(self._added, FIM_END_NAMES)}
        for name in ("generation_config.json", "config.json"):
            ids = read_optional_json(folder / name, fix=_FIX).get("eos_token_id")
            found.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
        return frozenset(token_id for token_id in found if isinstance(token_id, int) and 0 <= token_id < self.size)


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE (GPT-2) uses for bytes: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_letters()


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer beside an ONNX model. Raises ModelFileError if it is missing."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(f"{path} is missing: an ONNX model needs its tokenizer beside it. Copy it there")
    return path


def _open(path: Path, owner: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except IMPORT_FAILURES as exc:
        raise not_importable("an ONNX model", exc, "tokenizers") from exc
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises plain Exception
        raise ModelFileError(f"{owner} has no usable tokenizer: {exc}. Download or export the model again") from exc
    tokenizer.no_truncation()  # what it was last trained with is no property of a prompt
    tokenizer.no_padding()
    return tokenizer


def read_chat_template(folder: Path) -> str | None:
    """The chat template beside an ONNX model, None without one. Raises ModelFileError for damaged files."""
    tokenizer_file(folder)  # without it, to go on without a template is no way out
    return chat_template(folder, read_optional_json(folder / "tokenizer_config.json", fix=_FIX), fix=_FIX)

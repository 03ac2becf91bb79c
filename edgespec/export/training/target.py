"""Facts of a distillation's target from its JSON files: sizes, special tokens, chat template. Needs no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError, ModelNotFound
from edgespec.formats.hub_folder import chat_template, read_json, read_optional_json

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILES = ("tokenizer_config.json", "generation_config.json")
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
# GPT-2's names of these sizes.
_OTHER_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


@dataclass(frozen=True)
class TargetFacts:
    """Facts of a model folder from its JSON files. `begin_id`: the begin-of-text token, or None."""

    name: str
    folder: Path
    config: dict[str, Any]
    special_tokens: dict[str, str]
    chat_template: str | None
    begin_id: int | None
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    def size(self, key: str) -> int:
        """A size from config.json, by either of its names. Raises ModelFileError if it is missing."""
        value = self.config.get(key) or self.config.get(_OTHER_NAMES.get(key, key))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelFileError(f"{self.folder / 'config.json'}: {key} must be a positive number, got {value!r}")
        return value

    @property
    def kind(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    @property
    def kv_heads(self) -> int:
        return self.size("num_key_value_heads" if "num_key_value_heads" in self.config else "num_attention_heads")

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.size("hidden_size") // self.size("num_attention_heads"))

    @property
    def weight_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and weight file sizes; hashing the weights would take minutes."""
        digest = hashlib.sha256()
        for name in ("config.json", *TOKENIZER_FILES):
            path = self.folder / name
            digest.update(path.read_bytes() if path.is_file() else b"-")
        for path in self.weight_files:
            digest.update(f"{path.name} {path.stat().st_size}".encode())
        return digest.hexdigest()


def read_target(folder: Path, name: str = "") -> TargetFacts:
    """Facts of a model folder, without reading weights. `name` defaults to the folder's name.

    Raises ModelNotFound if it is not a folder, ModelFileError if a file is missing or damaged.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is not a folder: give a Hugging Face model folder (config.json, *.safetensors)")
    config = read_json(folder / "config.json")
    config = {**config, **config.get("text_config", {})}  # multimodal models nest the sizes of the language model
    if not (folder / TOKENIZER_FILE).is_file():
        raise ModelFileError(
            f"{folder} has no {TOKENIZER_FILE}: save the tokenizer as a fast one (AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...) of transformers writes it)"
        )
    settings, generation = (read_optional_json(folder / name) for name in SETTINGS_FILES)
    ids = _added_ids(folder)
    special = _special_tokens(settings)
    has_begin = settings.get("bos_token", "not said") is not None
    begin = ids.get(special.get("bos_token", ""), config.get("bos_token_id") if has_begin else None)
    stops = {*_as_ids(config.get("eos_token_id")), *_as_ids(generation.get("eos_token_id"))}
    if special.get("eos_token") in ids:
        stops.add(ids[special["eos_token"]])
    name = name or folder.resolve().name
    return TargetFacts(name, folder, config, special, chat_template(folder, settings), begin, frozenset(stops))


def _added_ids(folder: Path) -> dict[str, int]:
    path = folder / TOKENIZER_FILE
    try:
        return {token["content"]: int(token["id"]) for token in read_json(path).get("added_tokens") or []}
    except (TypeError, KeyError, ValueError) as exc:
        raise ModelFileError(f"{path} has an unknown format of added_tokens: {exc!r}") from exc


def _as_ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or [])


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Texts of the begin and end tokens, given as a string or (older files) an object."""
    found = {}
    for key in ("bos_token", "eos_token"):
        value = settings.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
    return found

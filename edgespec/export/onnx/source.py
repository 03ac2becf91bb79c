"""The Hugging Face folder that an ONNX export starts from: what is checked before, and copied after."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.export.checkpoint import Checkpoint
from edgespec.formats.hub_folder import CHAT_TEMPLATE, chat_template, read_json

REQUIRED = ("tokenizer.json", "tokenizer_config.json")
_WIDTH, _HEADS = ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")
COPIED = ("config.json", "generation_config.json", "special_tokens_map.json", CHAT_TEMPLATE, *REQUIRED)


@dataclass(frozen=True, slots=True)
class Source:
    """A folder whose files are there and whole. `config` is config.json."""

    folder: Path
    config: dict[str, Any]
    architecture: str

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the config that describes the language model."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def layers(self) -> int:
        return int(self.text_config.get("num_hidden_layers") or self.text_config["n_layer"])

    @property
    def is_tied(self) -> bool:
        """Whether embeddings serve as output projection. Gemma and GPT-2 say so only in transformers' defaults."""
        implied = self.config.get("model_type") in ("gemma", "gemma2", "gemma3_text", "gpt2", "smollm3")
        return bool(self.text_config.get("tie_word_embeddings", implied))

    @property
    def head_size(self) -> int:
        """Values in one attention head."""
        config = self.text_config
        width, heads = (config.get(new, config.get(old, 0)) for new, old in (_WIDTH, _HEADS))
        return int(config.get("head_dim") or width // max(heads, 1))

    def copy_companions(self, target: Path) -> None:
        """Tokenizer, config and template as the model's authors wrote them, over what an exporter wrote anew."""
        for name in COPIED:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, target / name)
        template = chat_template(self.folder, read_json(self.folder / "tokenizer_config.json"))
        if template is not None and not (self.folder / CHAT_TEMPLATE).is_file():
            (target / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def open_source(folder: Path) -> Source:
    """Check a folder before work starts. Raises ModelFileError for a missing, damaged or strange part."""
    if not folder.is_dir():
        raise ModelFileError(f"{folder} is no folder: give one as Hugging Face models are stored")
    config = Checkpoint.open(folder).config
    for name in REQUIRED:
        read_json(folder / name)
    architecture = next(iter(config.get("architectures") or []), None)
    if not isinstance(architecture, str):
        raise ModelFileError(f"{folder / 'config.json'} names no architecture: it lacks 'architectures'")
    source = Source(folder.resolve(), config, architecture)
    if not {"num_hidden_layers", "n_layer"} & source.text_config.keys():
        raise ModelFileError(f"{folder / 'config.json'} lacks 'num_hidden_layers'")
    return source

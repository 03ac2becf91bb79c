"""The Hugging Face folder of an ONNX export: checked before the export, tokenizer and config copied after it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.formats.architectures.table import is_tied
from edgespec.formats.checkpoint import Checkpoint
from edgespec.formats.hub_folder import CHAT_TEMPLATE, chat_template, read_json

REQUIRED = ("tokenizer.json", "tokenizer_config.json")
_WIDTH, _HEADS = ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")
COPIED = ("config.json", "generation_config.json", "special_tokens_map.json", CHAT_TEMPLATE, *REQUIRED)


@dataclass(frozen=True, slots=True)
class Source:
    """A checked folder; `config` is config.json."""

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
        """Whether the output projection is tied to the embeddings."""
        return is_tied(self.architecture, self.text_config)

    @property
    def head_size(self) -> int:
        config = self.text_config
        width, heads = (config.get(new, config.get(old, 0)) for new, old in (_WIDTH, _HEADS))
        return int(config.get("head_dim") or width // max(heads, 1))

    def copy_companions(self, target: Path) -> None:
        """Copy tokenizer, config and chat template of the source over the files that an exporter wrote."""
        for name in COPIED:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, target / name)
        template = chat_template(self.folder, read_json(self.folder / "tokenizer_config.json"))
        if template is not None and not (self.folder / CHAT_TEMPLATE).is_file():
            (target / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def open_source(folder: Path) -> Source:
    """Check a folder. Raises ModelFileError for missing, damaged or unsupported files."""
    if not folder.is_dir():
        raise ModelFileError(f"{folder} is not a folder: give a model folder in Hugging Face format")
    config = Checkpoint.open(folder).config
    for name in REQUIRED:
        read_json(folder / name)
    architecture = next(iter(config.get("architectures") or []), None)
    if not isinstance(architecture, str):
        raise ModelFileError(f"{folder / 'config.json'} lacks 'architectures'")
    source = Source(folder.resolve(), config, architecture)
    if not {"num_hidden_layers", "n_layer"} & source.text_config.keys():
        raise ModelFileError(f"{folder / 'config.json'} lacks 'num_hidden_layers'")
    return source

"""The Hugging Face folder of an ONNX export: checked before the export, tokenizer and config copied after it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError, shown
from edgespec.formats.architectures import is_tied
from edgespec.formats.checkpoint import Checkpoint, named_architecture
from edgespec.formats.hub_folder import CHAT_TEMPLATE, chat_template, read_json
from edgespec.vocabulary import retyped_names

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
        return self._count("num_hidden_layers", "n_layer")

    @property
    def is_tied(self) -> bool:
        """Whether the output projection is tied to the embeddings."""
        return is_tied(self.architecture, self.text_config)

    @property
    def head_size(self) -> int:
        if self.text_config.get("head_dim") is not None:
            return self._count("head_dim")
        return self._count(*_WIDTH) // self._count(*_HEADS)

    def _count(self, *names: str) -> int:
        """A setting under any of `names`. Raises ModelFileError unless it is a whole number above 0."""
        found = next((self.text_config[name] for name in names if self.text_config.get(name) is not None), None)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            given = f"{names[0]} {shown(found)}" if found is not None else f"no {names[0]}"
            raise ModelFileError(f"{self.folder / 'config.json'} has {given}; a whole number above 0 is needed")
        return found

    def copy_companions(self, target: Path) -> None:
        """Copy tokenizer, config and chat template of the source over the files that an exporter wrote."""
        for name in COPIED:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, target / name)
        _retype(target / "tokenizer.json")
        template = chat_template(self.folder, read_json(self.folder / "tokenizer_config.json"))
        if template is not None and not (self.folder / CHAT_TEMPLATE).is_file():
            (target / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _retype(path: Path) -> None:
    """Make control tokens in a tokenizer.json of what llama.cpp makes such, so that both engines read texts alike."""
    tokenizer = read_json(path)
    model, added = tokenizer.get("model") or {}, tokenizer.get("added_tokens") or []
    words = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(words) if isinstance(words, dict) else {}
    known = {token["content"]: token for token in added if isinstance(token, dict) and "content" in token}
    names = {*ids, *known}
    changed = [name for name in retyped_names(names.__contains__) if not known.get(name, {}).get("special")]
    for name in changed:
        flags = {"special": True, "normalized": False} | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        if name in known:
            known[name]["special"] = True
        else:
            added.append({"id": ids[name], "content": name} | flags)
    if changed:
        tokenizer["added_tokens"] = sorted(added, key=lambda token: token["id"])
        path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def open_source(folder: Path) -> Source:
    """Check a folder. Raises ModelFileError for missing, damaged or unsupported files."""
    if not folder.is_dir():
        raise ModelFileError(f"{folder} is not a folder: give a model folder in Hugging Face format")
    config = Checkpoint.open(folder).config
    for name in REQUIRED:
        read_json(folder / name)
    architecture = named_architecture(config)
    if architecture == "none":
        raise ModelFileError(f"{folder / 'config.json'} lacks 'architectures'")
    source = Source(folder.resolve(), config, architecture)
    source.layers, source.head_size  # noqa: B018 - raise for what is missing or impossible
    return source

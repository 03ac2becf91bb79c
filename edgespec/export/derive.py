"""Prunes a Hugging Face model to some of its layers, without torch; writes a new model folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from edgespec.errors import ConfigError, ModelFileError, UsageError
from edgespec.formats.architectures import ARCHITECTURES, Architecture, architecture_of, layer_kinds, rotated_layers
from edgespec.formats.checkpoint import Checkpoint, Config, StoredTensor
from edgespec.platform.files import atomic_folder
from edgespec.types import Progress, no_progress

CHUNK_BYTES = 1 << 22
LAYER_COUNTS = ("num_hidden_layers", "n_layer")
# Settings with one value per layer.
PER_LAYER = ("layer_types", "no_rope_layers")
# Settings that derive a layer's kind from its number; replaced by `layer_types` and `no_rope_layers`.
BY_NUMBER = ("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval", "max_window_layers")
CARRIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.*",
    "LICEN[CS]E*",
    "NOTICE*",
)
_LAYER = re.compile(r"((?:.*\.)?(?:layers|h)\.)(\d+)(\..+)")


def prune(folder: Path, output: Path, layers: Sequence[int], *, progress: Progress | None = None) -> Path:
    """Write the model of `folder` with only `layers` (from 0, ascending) to `output`, with layers renumbered from 0.

    Embeddings, norms and head are kept; tensors are copied bit by bit. `output` is written atomically. Raises
    ModelFileError for a damaged or unsupported checkpoint, ConfigError for layers that do not exist, UsageError if
    `output` exists, StateError if it cannot be written.
    """
    checkpoint = Checkpoint.open(folder)
    found = _architecture(checkpoint)
    depth = found.sizes(checkpoint).layers
    _check_layers(folder, layers, depth)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"{output} exists and is not empty; give another folder, or delete it")
    with atomic_folder(output) as temporary:
        config = pruned_config(checkpoint, found, layers, depth)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for pattern in CARRIED:
            for file in sorted(folder.glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, temporary / file.name)
        _write_weights(temporary / "model.safetensors", checkpoint, layers, progress or no_progress)
    return output


def _architecture(checkpoint: Checkpoint) -> Architecture:
    """The architecture of a checkpoint. Pruning supports more than conversion, but must know how layers differ."""
    if checkpoint.architecture not in ARCHITECTURES:
        return architecture_of(checkpoint)
    return ARCHITECTURES[checkpoint.architecture]


def _check_layers(folder: Path, layers: Sequence[int], depth: int) -> None:
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < depth:
        raise ConfigError(
            f"layers {','.join(map(str, layers)) or 'none'} were requested; {folder} has 0..{depth - 1}: "
            "give one or more of them, ascending"
        )


def pruned_config(checkpoint: Checkpoint, found: Architecture, layers: Sequence[int], depth: int) -> Config:
    """config.json for the kept layers; settings that depend on a layer's number become per-layer lists."""
    config: Config = dict(checkpoint.config)
    windowed = layer_kinds(checkpoint, found, depth)
    if "layer_types" in config or any(windowed):
        config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in windowed]
    if found.name == "smollm3":
        config["no_rope_layers"] = rotated_layers(config, depth)
    for key in PER_LAYER:
        if isinstance(config.get(key), list):
            config[key] = _kept(checkpoint, key, config[key], layers, depth)
    for key in BY_NUMBER:
        config.pop(key, None)
    for key in LAYER_COUNTS:
        if key in config:
            config[key] = len(layers)
    return config


def _kept(checkpoint: Checkpoint, key: str, values: list[Any], layers: Sequence[int], depth: int) -> list[Any]:
    if len(values) != depth:
        raise ModelFileError(
            f"{checkpoint.folder / 'config.json'} has {len(values)} {key} for a model of {depth} layers"
        )
    return [values[index] for index in layers]


def _write_weights(path: Path, checkpoint: Checkpoint, layers: Sequence[int], progress: Progress) -> None:
    """Write one safetensors file, copying tensors in pieces. The caller writes into a temporary folder."""
    numbers = {old: new for new, old in enumerate(layers)}
    kept = {new: tensor for name, tensor in checkpoint.tensors.items() if (new := _renamed(name, numbers))}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in kept.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, (name, tensor) in enumerate(kept.items()):
            progress(done, len(kept), name)
            _copy(tensor, file)
        file.flush()
        os.fsync(file.fileno())
    progress(len(kept), len(kept), "done")


def _renamed(name: str, numbers: dict[int, int]) -> str | None:
    """The new name of a tensor; None if its layer is removed."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    number = numbers.get(int(found[2]))
    return None if number is None else f"{found[1]}{number}{found[3]}"


def _copy(tensor: StoredTensor, file: BinaryIO) -> None:
    with tensor.file.open("rb") as source:
        source.seek(tensor.offset)
        left = tensor.num_bytes
        while left:
            chunk = source.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise ModelFileError(f"{tensor.file} became shorter while it was read")
            file.write(chunk)
            left -= len(chunk)

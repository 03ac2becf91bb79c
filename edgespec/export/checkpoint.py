"""A Hugging Face model folder, read without torch: its config, its weights one at a time, its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.utility import LocalTensor, SafetensorsLocal
from numpy.typing import NDArray

from edgespec.errors import ModelFileError

Config = dict[str, Any]
Weights = NDArray[np.float32]
_NUMPY_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises ModelFileError for a missing file and for text that is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing: give a folder as Hugging Face models are stored") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFileError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a {type(value).__name__}, an object was expected")
    return value


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder. `config` is config.json; weights stay on disk until `weights` asks for them."""

    folder: Path
    config: Config
    _tensors: dict[str, LocalTensor]

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """Raises ModelFileError when a file is missing, truncated, or of a kind that is not understood."""
        config = read_json(folder / "config.json")
        files = sorted(folder.glob("model*.safetensors"))
        if not files:
            raise ModelFileError(f"{folder} has no model*.safetensors: save the model with safe_serialization=True")
        tensors: dict[str, LocalTensor] = {}
        for file in files:
            tensors.update(_tensors_of(file))
        return Checkpoint(folder, config, tensors)

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def weights(self, name: str) -> Weights:
        """One tensor as float32, in its own shape. Raises ModelFileError for a type other than F64/F32/F16/BF16."""
        tensor = self._tensors[name]
        raw: NDArray[np.uint8] = tensor.mmap_bytes()
        if tensor.dtype == "BF16":
            wide = raw.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape(name))
        if tensor.dtype not in _NUMPY_TYPES:
            allowed = ", ".join((*_NUMPY_TYPES, "BF16"))
            raise ModelFileError(f"tensor {name} is stored as {tensor.dtype}; allowed: {allowed}")
        return raw.view(_NUMPY_TYPES[tensor.dtype]).astype(np.float32).reshape(self.shape(name))

    def require(self, key: str) -> Any:
        """A value of config.json that no model of this kind may lack."""
        if key not in self.config:
            raise ModelFileError(f"{self.folder / 'config.json'} lacks {key!r}")
        return self.config[key]


def _tensors_of(file: Path) -> dict[str, LocalTensor]:
    try:
        tensors: dict[str, LocalTensor] = SafetensorsLocal(file).tensors
        size = file.stat().st_size
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelFileError(f"{file} is not a safetensors file: {error}") from error
    for name, tensor in tensors.items():
        place = tensor.data_range
        if place.offset < 0 or place.size <= 0 or place.offset + place.size > size:
            raise ModelFileError(f"{file} is truncated: tensor {name} ends beyond the file of {size} bytes")
    return tensors

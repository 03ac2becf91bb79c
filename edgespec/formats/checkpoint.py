"""Reads a Hugging Face model folder without torch: config, weights one tensor at a time, tokenizer.

Safetensors files are read in plain Python, so that error messages name the file and the tensor. Format: 8 bytes of
header length, a JSON header (name -> dtype, shape, byte range), the tensors' bytes.
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.formats.hub_folder import read_json

Config = dict[str, Any]
Weights = NDArray[np.float32]
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
READABLE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# The sizes of types that cannot be converted are needed to check that a file is complete.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8}
# Masks and frequencies in old checkpoints, which are not weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
_SHARD_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


# What transformers takes where config.json says nothing, and no shape of a tensor would tell.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "SmolLM3ForCausalLM": {"rope_theta": 2e6},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 256},
    "Gemma3ForCausalLM": {"query_pre_attn_scalar": 256, "rope_theta": 1e6},
}


def full_config(folder: Path) -> Config:
    """config.json of a model folder, with what it implies. Raises as `read_json`."""
    config = read_json(folder / "config.json")
    return {**DEFAULTS.get(named_architecture(config), {}), **config}


def unsupported(name: object, architecture: str, what: str, known: Iterable[str]) -> ModelFileError:
    """The error for a model of an unknown architecture. `what` is made of the `known` ones."""
    optimum = "; for ONNX --exporter optimum" if what.startswith("ONNX") else ""
    return ModelFileError(
        f"{name} is a {architecture}; supported for {what}: {', '.join(known)}. llama.cpp's own convert_hf_to_gguf.py "
        f"knows more of them, and edgespec runs the files that it writes{optimum}"
    )


@contextmanager
def settings_of(folder: Path) -> Iterator[None]:
    """Raises ModelFileError where config.json has a setting of another type, or none where one is needed."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, LookupError, struct.error) as exc:
        raise ModelFileError(f"{folder / 'config.json'} has an impossible setting: {exc}") from exc


def named_architecture(config: Mapping[str, Any]) -> str:
    """The architecture named in a config.json, or 'none'."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else named
    return first if isinstance(first, str) else "none"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of one tensor: `offset` in bytes from the start of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """An opened model folder. `config`: config.json; `weights` reads single tensors from disk."""

    folder: Path
    config: Config
    tensors: dict[str, StoredTensor]

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """Read config and tensor headers. Raises ModelFileError if a file is missing, truncated or not supported."""
        config = full_config(folder)
        listed = _listed_tensors(folder)
        tensors: dict[str, StoredTensor] = {}
        for file in sorted({folder / name for name in listed.values()}) if listed else _weight_files(folder):
            for name, tensor in read_safetensors(file).items():
                if name in tensors:
                    raise ModelFileError(f"tensor {name} is in both {tensors[name].file.name} and {file}")
                tensors[name] = tensor
        for name, file_name in listed.items():
            if name not in tensors or tensors[name].file.name != file_name:
                raise ModelFileError(f"{folder / file_name} lacks tensor {name}, which {INDEX} puts there")
        return Checkpoint(folder, config, tensors)

    @property
    def architecture(self) -> str:
        """The architecture named in config.json, or 'none'."""
        return named_architecture(self.config)

    def names(self) -> Iterator[str]:
        return iter(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def weights(self, name: str) -> Weights:
        """One tensor as float32, in its stored shape. Raises ModelFileError for types other than F64/F32/F16/BF16."""
        tensor = self.tensors[name]
        return self._read(name, 0, math.prod(tensor.shape)).reshape(tensor.shape)

    def rows_of(self, name: str, start: int, stop: int) -> Weights:
        """Some rows [stop - start, columns] of a matrix as float32. Raises ModelFileError like `weights`."""
        columns = self.tensors[name].shape[1]
        return self._read(name, start * columns, (stop - start) * columns).reshape(-1, columns)

    def _read(self, name: str, first: int, count: int) -> Weights:
        """`count` numbers of a tensor from its `first` on. Read, not mapped, so that they are not kept in memory."""
        tensor = self.tensors[name]
        self.check_type(name)
        kind = np.dtype(READABLE[tensor.dtype])
        try:
            raw: NDArray[Any] = np.fromfile(tensor.file, kind, count, offset=tensor.offset + first * kind.itemsize)
        except OSError as error:
            raise ModelFileError(f"{tensor.file} cannot be read: {error}") from error
        if raw.size != count:
            raise ModelFileError(f"{tensor.file} became shorter while tensor {name} was read")
        if tensor.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)

    def check_finite(self, name: str, values: Weights) -> None:
        """Raise ModelFileError where weights of a tensor, or the least and the most of them, are no numbers."""
        if not np.isfinite(values).all():
            raise ModelFileError(
                f"{self.tensors[name].file}: tensor {name} contains infinity or NaN. Download it again"
            )

    def check_type(self, name: str) -> None:
        """Raise ModelFileError unless a tensor is stored as a type that `weights` reads."""
        tensor = self.tensors[name]
        if tensor.dtype not in READABLE:
            allowed = ", ".join(READABLE)
            raise ModelFileError(f"{tensor.file}: tensor {name} is stored as {tensor.dtype}; allowed: {allowed}")

    def require(self, key: str) -> Any:
        """A required value of config.json. Raises ModelFileError if it is missing."""
        if self.config.get(key) is None:
            raise ModelFileError(f"{self.folder / 'config.json'} lacks {key!r}")
        return self.config[key]

    def count(self, key: str) -> int:
        """A required positive integer of config.json. Raises ModelFileError."""
        value = self.require(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelFileError(f"{self.folder / 'config.json'} has {key} {value!r}, must be a positive integer")
        return value


def _listed_tensors(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a sharded checkpoint; empty without an index."""
    if (folder / WHOLE).is_file() or not (folder / INDEX).exists():  # as transformers reads a folder with both
        return {}
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelFileError(f"{folder / INDEX} has no weight_map")
    for file_name in set(listed.values()):
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelFileError(f"{folder / INDEX} names the file {file_name!r}; allowed: names inside the folder")
        if not (folder / file_name).is_file():
            raise ModelFileError(f"{folder / file_name} is missing, which {INDEX} names. Download it again")
    return listed


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelFileError(f"{folder} has no model*.safetensors: save the model with safe_serialization=True")
    shards = [found for file in files if (found := _SHARD_NAME.search(file.name))]
    if shards and len(shards) != int(shards[0][2]):
        raise ModelFileError(f"{folder} has {len(shards)} of {int(shards[0][2])} safetensors shards. Download the rest")
    return files


def read_safetensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, sorted by name. Raises ModelFileError for anything but a complete safetensors file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ModelFileError(f"{file} is not a safetensors file, or is truncated: its header is {length} bytes")
            header = json.loads(opened.read(length).decode("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelFileError(f"{file} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ModelFileError(f"{file} is not a safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    return {name: _stored_tensor(file, size, 8 + length, name, header[name]) for name in sorted(header)}


def _stored_tensor(file: Path, size: int, start: int, name: str, entry: Any) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(value) is int and value >= 0 for value in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise ModelFileError(f"{file} is damaged: tensor {name} is described by {str(entry)[:80]!r}") from error
    if not whole or not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelFileError(f"{file} is damaged: tensor {name} has type {dtype!r} and shape {shape}")
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ModelFileError(f"{file} is damaged: tensor {name} of {dtype} {shape} has {end - begin} bytes")
    if start + end > size:
        raise ModelFileError(f"{file} is truncated: tensor {name} ends at byte {start + end} of {size}")
    return StoredTensor(file, dtype, shape, start + begin, end - begin)

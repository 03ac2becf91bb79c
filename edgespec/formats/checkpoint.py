"""Reads a Hugging Face model folder without torch: config.json, other small files, and weights one tensor at a time."""

from __future__ import annotations

import fnmatch
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError, shown

CHAT_TEMPLATE = "chat_template.jinja"
FOLDER_FIX = "give a folder as Hugging Face models are stored"


def read_json(path: Path, *, fix: str = FOLDER_FIX) -> dict[str, Any]:
    """One JSON object. Raises ModelFileError, which names the `fix`, for anything else and for a missing file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing: {fix}") from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8, an integer without end
        raise ModelFileError(f"{path} cannot be read as JSON: {error}; {fix}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds {shown(value)}, an object was expected; {fix}")
    return value


def read_optional_json(path: Path, *, fix: str = FOLDER_FIX) -> dict[str, Any]:
    """`read_json`, but an empty object where there is no such file."""
    return read_json(path, fix=fix) if path.is_file() else {}


def chat_template(folder: Path, settings: Mapping[str, Any], *, fix: str = FOLDER_FIX) -> str | None:
    """From chat_template.jinja, else from `settings` (tokenizer_config.json); of several named ones the default.

    Raises ModelFileError for a file that cannot be read.
    """
    path = folder / CHAT_TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{path} cannot be read: {error}; {fix}") from error
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None


Config = dict[str, Any]
Weights = NDArray[np.float32]
READABLE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors")
# Masks and frequencies in old checkpoints, which are not weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")

# What transformers takes where config.json says nothing, and no shape of a tensor would tell.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "SmolLM3ForCausalLM": {"rope_theta": 2e6},
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
        config, tensors = full_config(folder), dict[str, StoredTensor]()
        for name in weight_names(str(folder), [path.name for path in folder.iterdir()]):
            for tensor, found in read_safetensors(folder / name).items():
                if tensor in tensors:
                    raise ModelFileError(f"tensor {tensor} is in both {tensors[tensor].file.name} and {folder / name}")
                tensors[tensor] = found
        return Checkpoint(folder, config, tensors)

    @property
    def architecture(self) -> str:
        """The architecture named in config.json, or 'none'."""
        return named_architecture(self.config)

    def weights(self, name: str) -> Weights:
        """One tensor as float32, in its stored shape. Raises ModelFileError for types other than F64/F32/F16/BF16.

        Read, not mapped, so that it is not kept in memory.
        """
        tensor = self.tensors[name]
        self.check_type(name)
        kind, count = np.dtype(READABLE[tensor.dtype]), math.prod(tensor.shape)
        try:
            raw: NDArray[Any] = np.fromfile(tensor.file, kind, count, offset=tensor.offset)
        except OSError as error:
            raise ModelFileError(f"{tensor.file} cannot be read: {error}") from error
        if raw.size != count:
            raise ModelFileError(f"{tensor.file} became shorter while tensor {name} was read")
        if tensor.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False).reshape(tensor.shape)

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


def weight_names(where: str, names: Sequence[str]) -> list[str]:
    """The safetensors files of a model among all `names`; one whole file outranks shards, as in transformers.

    Raises ModelFileError that says what is there instead.
    """
    found = sorted(matching(names, WEIGHT_FILES))
    if "model.safetensors" in found:
        return ["model.safetensors"]
    if found:
        wanted = int(found[0].rpartition("-of-")[2].removesuffix(".safetensors") or 0)
        if len(found) != wanted:
            raise ModelFileError(f"{where} has {len(found)} of {wanted} weight files: fetch the rest")
        return found
    if ggufs := matching(names, ("*.gguf",)):
        raise ModelFileError(
            f"{where} already holds GGUF files ({ggufs[0]}): run one, or convert it: edgespec export FILE --to onnx"
        )
    there = ", ".join(sorted(names)[:5]) or "nothing"
    raise ModelFileError(
        f"{where} has no model.safetensors, only {there}: give the folder or hub id of a transformers model. Merge an "
        "adapter into its base model first; save pickled weights, which can run code when they are read, with "
        "safe_serialization=True"
    )


def matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def read_safetensors(file: Path) -> dict[str, StoredTensor]:
    """Location of every tensor by name, in their order. Raises ModelFileError if the file is damaged or truncated."""
    from gguf.utility import SafetensorsLocal

    try:
        size, found = file.stat().st_size, dict[str, StoredTensor]()
        for name, each in SafetensorsLocal(file).tensors.items():
            tensor = StoredTensor(file, each.dtype, each.shape, each.data_range.offset, each.data_range.size)
            item = np.dtype(READABLE.get(tensor.dtype, "u1")).itemsize
            if tensor.dtype in READABLE and math.prod(tensor.shape) * item != tensor.num_bytes:
                raise ValueError(f"tensor {name} of {tensor.dtype} {tensor.shape} has {tensor.num_bytes} bytes")
            if min(tensor.offset, tensor.num_bytes, *tensor.shape) < 0 or tensor.offset + tensor.num_bytes > size:
                raise ValueError(f"tensor {name} ends at byte {tensor.offset + tensor.num_bytes} of {size}")
            found[name] = tensor
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise ModelFileError(f"{file} is truncated, damaged or no safetensors file: {exc}. Fetch it again") from exc
    return found

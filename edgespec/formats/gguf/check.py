"""What kind of model a GGUF holds, the files that it consists of, and whether it is worth loading.

A file that passes may still be one on which llama.cpp would end the process: `engines.trial` loads it in a child
process first. What is not known here: a decoder that was trained for embeddings, whose header reads like any other.

Models in several files: what llama.cpp's own tool split, a first file with all metadata and shards, whose names follow
from its name: `NAME-00001-of-00003.gguf`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from edgespec.errors import ModelFileError, ModelNotFound
from edgespec.formats.gguf.header import GgufHeader, GgufNumbers, once, read_header

HeadKind = Literal["eagle3", "dflash", "mtp"]
HEAD_NAMES: Mapping[HeadKind, str] = {
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash head",
    "mtp": "a multi-token prediction layer",
}
GEMMA4_DRAFTER = "gemma4-assistant"
_HEAD_ARCHITECTURES: Mapping[str, HeadKind] = {"eagle3": "eagle3", "dflash": "dflash", GEMMA4_DRAFTER: "mtp"}
# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: general.type
_OF_TYPE = {
    "mmproj": "a multimodal projector (mmproj), which encodes images or sound",
    "adapter": "a LoRA adapter, which changes a model",
    "imatrix": "an importance matrix, an input of llama-quantize",
}
# Whose multi-token prediction layers read the hidden state behind the final norm. Tests run the first one.
_WITH_MTP = ("qwen35", "qwen35moe")
_POOLINGS = {0: "", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # llama.cpp's llama_pooling_type
_NEVER_CAUSAL = ("gemma-embedding", "llama-embed")  # whose files need not say so: llama.cpp knows
_ENCODERS = ("t5", "t5encoder")  # that do not say so under attention.causal


def gives_only_embeddings(header: GgufHeader) -> bool:
    """Whether a model reads a whole text at once, and its file says which of the states are the text's embedding."""
    return _is_encoder(header) and pooling_of(header) in ("mean", "cls", "last")


def pooling_of(header: GgufHeader) -> str:
    """How hidden states become an embedding: mean, cls, last or another word; empty where the file does not say."""
    number = header.value("pooling_type")
    return _POOLINGS.get(number, f"of type {number}") if isinstance(number, int) else ""


def _is_encoder(header: GgufHeader) -> bool:
    # A DFlash head says so too: it reads a block of a text at once, and drafts.
    says_so = header.value("attention.causal") is False
    return (says_so or header.architecture in _NEVER_CAUSAL) and head_kind(header) is None


def require_language_model(path: Path, header: GgufHeader) -> None:
    """Raises ModelFileError, naming what the file is and what to give instead, for one that writes and drafts none."""
    kind = "mmproj" if header.architecture == "clip" else str(header.metadata.get("general.type", ""))
    if kind in _OF_TYPE:
        raise ModelFileError(
            f"{path} is not a text-generation model: it is {_OF_TYPE[kind]}: give the .gguf file of a model"
        )
    if _is_encoder(header) or header.architecture in _ENCODERS:
        raise ModelFileError(
            f"{path} is not a text-generation model: {header.architecture} models read a whole text at once, for "
            "embeddings or reranking: give one that writes token by token, such as a Llama or Qwen"
        )


def head_kind(header: GgufHeader) -> HeadKind | None:
    """The kind of head that a file holds, which drafts for another model; None for a model."""
    if header.architecture in _HEAD_ARCHITECTURES:
        return _HEAD_ARCHITECTURES[header.architecture]
    return "mtp" if _has_only_mtp(header) else None


def is_gemma4_drafter(header: GgufHeader) -> bool:
    """Whether it is a head of kind mtp that attends to the cache of a Gemma 4."""
    return header.architecture == GEMMA4_DRAFTER


def _has_only_mtp(header: GgufHeader) -> bool:
    has_first_layer = any(tensor.name.startswith("blk.0.") for tensor in header.tensors)
    return has_mtp(header) and bool(header.tensors) and not has_first_layer


def has_mtp(header: GgufHeader) -> bool:
    """Whether a model has a multi-token prediction layer that can draft for it."""
    count = header.value("nextn_predict_layers")
    return header.architecture in _WITH_MTP and isinstance(count, int) and count > 0


def main_layers(header: GgufHeader) -> int:
    """Layers of the model itself, without those that predict further tokens."""
    counts = (header.value(key) for key in ("block_count", "nextn_predict_layers"))
    all_layers, further = (count if isinstance(count, int) else 0 for count in counts)
    return all_layers - further


NUMBER, COUNT = "split.no", "split.count"
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def model_files(path: Path) -> tuple[Path, ...]:
    """`path`, and after it the shards that its header names, in llama.cpp's order.

    Raises ModelNotFound, and ModelFileError for a part that is not the first.
    """
    return (path, *(path.parent / name for name in shard_names(path, read_header(path))))


def shard_names(path: Path, header: GgufHeader) -> list[str]:
    """Names of the other files of a model that llama.cpp's tool split; empty for one in a single file."""
    count = header.metadata.get(COUNT)
    if not isinstance(count, int) or count < 2:
        return []
    names = split_names(path.name)
    if len(names) != count:
        raise ModelFileError(
            f"{path} is one of {count} parts of a model, but is not named like one: give it the name that it was "
            f"published with, which ends in -00001-of-{count:05}.gguf"
        )
    if header.metadata.get(NUMBER) != 0 or path.name != names[0]:
        raise ModelFileError(f"{path} is a part of a model: open its first file, {names[0]}")
    return names[1:]


def split_names(name: str) -> list[str]:
    """The names of all parts of a model, of which this is one; empty where it is not named like one."""
    if (parts := SPLIT_NAME.fullmatch(name)) is None:
        return []
    return [f"{parts['stem']}-{number:05}-of-{parts['count']}.gguf" for number in range(1, int(parts["count"]) + 1)]


def with_shards(path: Path, header: GgufHeader) -> GgufHeader:
    """`header` with the tensors of all shards; as it is for a model in one file.

    Raises ModelFileError naming the shard that is missing, damaged, or of another model.
    """
    names = shard_names(path, header)
    shards = [_read_shard(path, path.parent / name, number) for number, name in enumerate(names, start=1)]
    tensors = list(header.tensors)
    for number, shard in enumerate(shards, start=1):
        tensors += (replace(tensor, shard=number) for tensor in shard.tensors)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ModelFileError(f"{path} is not a usable model: two of its parts hold the same tensor. Export it again")
    places = tuple((name, shard.data_start) for name, shard in zip(names, shards, strict=True))
    return replace(header, tensors=tuple(tensors), shards=places)


def _read_shard(path: Path, file: Path, number: int) -> GgufHeader:
    try:
        shard = read_header(file)
    except ModelNotFound as exc:
        raise ModelFileError(
            f"{file} is missing, a part of {path.name}. Keep the files of a model together, under their names"
        ) from exc
    if shard.metadata.get(NUMBER) != number:
        raise ModelFileError(
            f"{file} is part {shard.metadata.get(NUMBER)!r} of a model, {path.name} names it as part {number}"
        )
    return shard


MAX_LAYERS = 512
MAX_EXPERTS = 512
MAX_EXTENT = 1 << 20
UINT32, INT32, FLOAT32 = 4, 5, 6


def check_gguf(path: Path) -> GgufHeader:
    """The header of a file that is worth loading; of a split model with the tensors of all its shards.

    Raises ModelNotFound when there is no such file, ModelFileError naming what is wrong with it.
    """
    return once("checked", path, lambda: _checked(path))


def _checked(path: Path) -> GgufHeader:
    header = with_shards(path, read_header(path))
    if not gives_only_embeddings(header):
        require_language_model(path, header)
    for reason in _faults(header):
        raise ModelFileError(f"{path} is not a usable model: {reason}. Download or export it again")
    return header


def _faults(header: GgufHeader) -> Iterator[str]:
    """What is wrong with a header, most basic first."""
    if not header.architecture:
        yield "it does not name its architecture"
    yield from _bad_shape(header)
    yield from _bad_vocabulary(header)
    if not header.tensors:
        yield "it holds no tensors"


def _bad_shape(header: GgufHeader) -> Iterator[str]:
    """Counts that a plan multiplies, before anything is tried."""
    limits = {
        "block_count": (1, MAX_LAYERS),
        "context_length": (1, (1 << 31) - 1),
        "embedding_length": (1, MAX_EXTENT),
        "feed_forward_length": (0, MAX_EXTENT << 2),
        "attention.head_count": (0, MAX_EXTENT),
        "attention.head_count_kv": (0, MAX_EXTENT),
        "attention.key_length": (1, MAX_EXTENT),
        "attention.value_length": (1, MAX_EXTENT),
        "rope.dimension_count": (0, MAX_EXTENT),
        "expert_count": (0, MAX_EXPERTS),
        "expert_used_count": (0, MAX_EXPERTS),
    }
    for name, (low, high) in limits.items():
        values = header.listed(name)
        if name in ("block_count", "embedding_length", "context_length") and not values:
            yield f"{name} is missing"
        for value in values:
            if not isinstance(value, int) or not low <= value <= high:
                yield f"{name} is {value!r}, allowed is {low}..{high}"
    if main_layers(header) < 1 and not is_gemma4_drafter(header):
        yield "it has no layers but those that predict further tokens"


def _bad_vocabulary(header: GgufHeader) -> Iterator[str]:
    """What ends a process that reads no more than the vocabulary, which no trial precedes."""
    model = header.metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        yield "it has no tokenizer"
    if model in ("none", "no_vocab"):
        yield "it has no vocabulary, so no text can be read or written"
    tokens = header.tokens
    if not tokens:
        yield "its vocabulary is empty"
        return
    different = set(tokens)
    if len(different) < len(tokens):
        twice = [token for token, count in Counter(tokens).items() if count > 1 and token]
        for token in twice[:1]:
            yield f"the token {token.decode('utf-8', errors='backslashreplace')!r} is in its vocabulary twice"
    for name, kinds in {"token_type": (INT32, UINT32), "scores": (FLOAT32,)}.items():
        found = header.metadata.get(f"tokenizer.ggml.{name}", None)
        if found is None:
            continue
        if not isinstance(found, GgufNumbers) or found.kind not in kinds or len(found.items) != len(tokens):
            yield f"its {name} list does not fit its {len(tokens)} tokens"
    if model == "llama" and not {f"<0x{byte:02X}>".encode() for byte in range(256)} <= different:
        yield "its vocabulary lacks a token for some byte"

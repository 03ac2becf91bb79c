"""Refuses the GGUF files on which llama.cpp would end the process instead of returning an error.

A file that passes may still be wrong in ways only the library knows: `engines.trial` loads it in a child process first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.formats.gguf.header import GgufHeader, once, read_header
from edgespec.formats.gguf.kind import is_gemma4_drafter, main_layers, require_text_model
from edgespec.formats.gguf.split import with_shards
from edgespec.formats.gguf.values import GgufNumbers, GgufStrings, Scalar

MAX_LAYERS = 512
MAX_EXPERTS = 512
MAX_EXTENT = 1 << 20
UINT32, INT32, FLOAT32 = 4, 5, 6
NOT_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64"})
ROPE_SCALINGS = frozenset({"none", "linear", "yarn", "longrope"})


def check_gguf(path: Path) -> GgufHeader:
    """The header of a file that is worth loading; of a split model with the tensors of all its shards.

    Raises ModelNotFound when there is no such file, ModelFileError naming what is wrong with it.
    """
    return once("checked", path, lambda: _checked(path))


def _checked(path: Path) -> GgufHeader:
    header = with_shards(path, read_header(path))
    require_text_model(path, header)
    for reason in _faults(header):
        raise ModelFileError(f"{path} is not a usable model: {reason}. Download or export it again")
    return header


def _faults(header: GgufHeader) -> Iterator[str]:
    """What is wrong with a header, most basic first."""
    if not header.architecture:
        yield "it does not name its architecture"
    yield from _bad_shape(header)
    yield from _bad_numbers(header)
    yield from _bad_vocabulary(header)
    yield from _bad_tensors(header)


def _bad_shape(header: GgufHeader) -> Iterator[str]:
    """Counts that llama.cpp asserts on or divides by."""
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
        values = _values(header, name)
        if name in ("block_count", "embedding_length", "context_length") and not values:
            yield f"{name} is missing"
        for value in values:
            if not isinstance(value, int) or not low <= value <= high:
                yield f"{name} is {value!r}, allowed is {low}..{high}"
    if _counts(header, "block_count") and main_layers(header) < 1 and not is_gemma4_drafter(header):
        yield "it has no layers but those that predict further tokens"
    yield from _bad_experts(header)
    yield from _bad_heads(header)


def _bad_experts(header: GgufHeader) -> Iterator[str]:
    experts, used = (max(_counts(header, name), default=0) for name in ("expert_count", "expert_used_count"))
    if used > experts or (experts and not used):
        yield f"it has {experts} experts and uses {used} of them"


def _bad_heads(header: GgufHeader) -> Iterator[str]:
    heads, kv_heads = (_counts(header, f"attention.head_count{suffix}") for suffix in ("", "_kv"))
    if not any(heads):
        return
    width = max(_counts(header, "embedding_length"), default=0)
    if len(heads) == 1 and not _values(header, "attention.key_length") and width % heads[0]:
        yield f"an embedding of {width} cannot be shared by {heads[0]} heads"
    if len(heads) == len(kv_heads) == 1 and (kv_heads[0] == 0 or heads[0] % kv_heads[0]):
        yield f"{heads[0]} heads cannot share {kv_heads[0]} key heads"


def _bad_numbers(header: GgufHeader) -> Iterator[str]:
    for name in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base"):
        for value in _values(header, name):
            if not isinstance(value, float) or not math.isfinite(value) or value < 0:
                yield f"{name} is {value!r}, it must be a finite number of at least 0"
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type")
    if scaling is not None and not (isinstance(scaling, str) and scaling in ROPE_SCALINGS):
        yield f"its rope scaling {scaling!r} is not known; known: {', '.join(sorted(ROPE_SCALINGS))}"


def _bad_vocabulary(header: GgufHeader) -> Iterator[str]:
    model = header.metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        yield "it has no tokenizer"
    if model in ("none", "no_vocab"):
        yield "it has no vocabulary, so no text can be read or written"
    tokens = _strings(header, "tokens")
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


def _bad_tensors(header: GgufHeader) -> Iterator[str]:
    """Types for which ggml has no kernel where llama.cpp uses them."""
    if not header.tensors:
        yield "it holds no tensors"
    for tensor in header.tensors:
        is_vector = len(tensor.shape) == 1
        is_norm = tensor.name.endswith("norm.weight")
        if (is_norm or is_vector) and tensor.kind not in ("F32", *NOT_WEIGHTS):
            yield f"tensor {tensor.name!r} is {tensor.kind}, vectors and norm weights must be F32"
        if tensor.name.endswith(".weight") and tensor.kind in NOT_WEIGHTS:
            yield f"tensor {tensor.name!r} is {tensor.kind}, weights cannot be"


def _values(header: GgufHeader, name: str) -> tuple[Scalar, ...]:
    """What stands under an architecture's key: nothing, one number, or one per layer."""
    found = header.metadata.get(f"{header.architecture}.{name}")
    if found is None or isinstance(found, GgufStrings):
        return ()
    return found.items if isinstance(found, GgufNumbers) else (found,)


def _counts(header: GgufHeader, name: str) -> tuple[int, ...]:
    return tuple(value for value in _values(header, name) if isinstance(value, int))


def _strings(header: GgufHeader, name: str) -> list[bytes]:
    found = header.metadata.get(f"tokenizer.ggml.{name}")
    return found.items if isinstance(found, GgufStrings) else []

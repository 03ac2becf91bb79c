"""Tiny random Llama models as GGUF files: real input for the library, in milliseconds and without training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

NORMAL, UNKNOWN, CONTROL = gguf.TokenType.NORMAL, gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL
SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


@dataclass(frozen=True)
class Shape:
    """What a tiny model looks like; `weights` is the type its matrices are stored in."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 128
    context: int = 512
    merges: int = 40
    seed: int = 0
    weights: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    has_template: bool = True
    specials: tuple[str, ...] = SPECIALS  # the first one begins and ends texts


def byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each byte value."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def vocabulary(merges: int, specials: Sequence[str] = SPECIALS) -> tuple[list[str], list[str]]:
    """All bytes, then some merged pairs of small letters, then the specials: (tokens, merge rules)."""
    letters = [chr(ord("a") + i) for i in range(26)]
    pairs = [(a, b) for a in letters for b in "aeiou"][:merges]
    return [*byte_letters(), *(a + b for a, b in pairs), *specials], [f"{a} {b}" for a, b in pairs]


def write_vocabulary(writer: gguf.GGUFWriter, shape: Shape) -> int:
    tokens, merges = vocabulary(shape.merges, shape.specials)
    first_special = len(tokens) - len(shape.specials)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL if i < first_special else CONTROL for i in range(len(tokens))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(first_special)
    writer.add_eos_token_id(first_special)
    writer.add_add_bos_token(False)
    if shape.has_template:
        writer.add_chat_template(TEMPLATE)
    return len(tokens)


def matrices(shape: Shape, tokens: int) -> dict[str, NDArray[np.float32]]:
    """Every tensor of the model by its GGUF name, as [rows, columns] or [columns]."""
    rng = np.random.default_rng(shape.seed)
    kv_width = shape.width // shape.heads * shape.kv_heads

    def draw(rows: int, columns: int) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * (1.5 / math.sqrt(columns))).astype(np.float32)

    found = {"token_embd.weight": draw(tokens, shape.width) * 8, "output_norm.weight": np.ones(shape.width, np.float32)}
    found["output.weight"] = draw(tokens, shape.width)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        found[f"{block}.attn_norm.weight"] = np.ones(shape.width, np.float32)
        found[f"{block}.ffn_norm.weight"] = np.ones(shape.width, np.float32)
        found[f"{block}.attn_q.weight"] = draw(shape.width, shape.width)
        found[f"{block}.attn_k.weight"] = draw(kv_width, shape.width)
        found[f"{block}.attn_v.weight"] = draw(kv_width, shape.width)
        found[f"{block}.attn_output.weight"] = draw(shape.width, shape.width)
        found[f"{block}.ffn_gate.weight"] = draw(shape.hidden, shape.width)
        found[f"{block}.ffn_up.weight"] = draw(shape.hidden, shape.width)
        found[f"{block}.ffn_down.weight"] = draw(shape.width, shape.hidden)
    return found


def write_model(
    path: Path,
    shape: Shape = Shape(),
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any] | None] | None = None,
) -> Path:
    """Write a random Llama of `shape` to `path`.

    `metadata` and `tensors` replace what a sound file would hold, None leaves an entry out: this makes faulty files.
    """
    sizes = {"width": shape.width, "hidden": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads}
    writer = begin(path, "llama", context=shape.context, layers=shape.layers, **sizes)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    tokens = write_vocabulary(writer, shape)
    return finish(writer, path, {**matrices(shape, tokens), **(tensors or {})}, metadata, shape.weights)


def begin(
    path: Path,
    architecture: str,
    *,
    context: int,
    width: int,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    size: int | None = None,
    epsilon: float = 1e-5,
) -> gguf.GGUFWriter:
    """A file with the sizes that every architecture has; `size`: of its heads, where it is not width / heads."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(epsilon)
    if kv_heads is not None:
        writer.add_head_count_kv(kv_heads)
    if size is not None:
        writer.add_key_length(size)
        writer.add_value_length(size)
    return writer


def finish(
    writer: gguf.GGUFWriter,
    path: Path,
    tensors: Mapping[str, NDArray[Any] | None],
    metadata: Mapping[str, Any] | None = None,
    kind: gguf.GGMLQuantizationType | Callable[[str], gguf.GGMLQuantizationType] = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Write the file; `kind` of its matrices, by name if it is a function. A tensor that is None is left out."""
    replace_metadata(writer, metadata or {})
    for name, values in tensors.items():
        if values is not None:
            add_tensor(writer, name, values, kind(name) if callable(kind) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def replace_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Overwrite entries, keeping the type of those that exist; the writer's own methods refuse that."""
    entries = writer.kv_data[0]
    for key, value in metadata.items():
        before = entries.pop(key, None)
        if value is None:
            continue
        if isinstance(value, np.uint32):  # a new entry that llama.cpp wants to have no sign
            kind = gguf.GGUFValueType.UINT32
        else:
            kind = before.type if before and not isinstance(value, str | list) else gguf.GGUFValueType.get_type(value)
        item = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) and value else None
        entries[key] = gguf.gguf_writer.GGUFValue(value, kind, item)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: NDArray[Any], kind: gguf.GGMLQuantizationType) -> None:
    """Matrices in `kind`; vectors, and what is not float32 already, as they are."""
    if values.ndim == 1 or values.dtype != np.float32 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def write_recurrent_model(path: Path) -> Path:
    """Write a random Mamba of one layer: a model whose state cannot be rolled back."""
    width, inner, state, kernel, rank = 32, 64, 8, 4, 2
    rng = np.random.default_rng(0)
    writer = begin(path, "mamba", context=512, width=width, layers=1, hidden=0, heads=0)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    tokens = write_vocabulary(writer, Shape(merges=5))
    shapes = {
        "token_embd.weight": (tokens, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ssm_in.weight": (2 * inner, width),
        "blk.0.ssm_conv1d.weight": (inner, kernel),
        "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * state, inner),
        "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,),
        "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (width, inner),
    }
    tensors = {name: (rng.standard_normal(extents) / 4).astype(np.float32) for name, extents in shapes.items()}
    tensors["blk.0.ssm_a"] = -np.abs(rng.standard_normal((inner, state))).astype(np.float32)
    return finish(writer, path, tensors)


def sentencepiece() -> dict[str, Any]:
    """Metadata of a small SentencePiece vocabulary that begins texts with `<s>` and a space: (bytes, then words)."""
    words = ["\u2581", "\u2581hello", "he", "ll", "o", "h", "e", "l", "\u2581w", "w", "r", "d"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    byte = int(gguf.TokenType.BYTE)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [byte] * 256 + [1] * len(words),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": None,
    }


def write_sentencepiece_model(path: Path) -> Path:
    """Write a random Llama with the vocabulary of `sentencepiece`."""
    metadata = sentencepiece()
    size = len(metadata["tokenizer.ggml.tokens"])
    shape = Shape(layers=1, width=32, heads=2, kv_heads=1, hidden=32)
    found = matrices(shape, size)
    return write_model(path, shape, metadata=metadata, tensors=found)

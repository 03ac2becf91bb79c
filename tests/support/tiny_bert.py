"""A tiny random BERT as a GGUF file: an encoder with a WordPiece vocabulary, for embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiny_gguf import begin, finish

WORDS = ["find", "me", "a", "bus", "to", "hello", "world", "table", "for", "two"]
LETTERS = [chr(ord("a") + i) for i in range(26)]


def write_bert(
    path: Path,
    pooling: int | None = 1,
    *,
    context: int = 128,
    width: int = 64,
    layers: int = 2,
    damaged: NDArray[np.float32] | None = None,
) -> Path:
    """Write it to `path`; `pooling` None leaves its type out. `damaged`: a matrix of the first layer."""
    rng = np.random.default_rng(0)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens += [f"\u2581{word}" for word in dict.fromkeys((*WORDS, *LETTERS))] + [f"{letter}x" for letter in LETTERS]
    writer = begin(path, "bert", context=context, width=width, layers=layers, hidden=2 * width, heads=4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_uint32("bert.pooling_type", pooling)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 5 + [1] * (len(tokens) - 5))
    writer.add_token_type_count(2)
    for kind, number in {"unknown": 1, "bos": 2, "cls": 2, "seperator": 3, "padding": 0, "mask": 4}.items():
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", number)
    shapes = {"token_embd": (len(tokens), width), "position_embd": (context, width), "token_types": (2, width)}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.attn_{part}": (width, width) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_up": (2 * width, width), f"blk.{layer}.ffn_down": (width, 2 * width)}
    tensors = dict[str, NDArray[np.float32]]()
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = (rng.standard_normal(shape) / np.sqrt(width) * 2).astype(np.float32)
        if name.startswith("blk."):
            tensors[f"{name}.bias"] = (rng.standard_normal(shape[0]) / 10).astype(np.float32)
    tensors |= {} if damaged is None else {"blk.0.attn_v.weight": damaged}
    norms = [f"blk.{layer}.{name}" for layer in range(layers) for name in ("attn_output_norm", "layer_output_norm")]
    for name in ("token_embd_norm", *norms):
        tensors |= {f"{name}.weight": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}
    return finish(writer, path, tensors)

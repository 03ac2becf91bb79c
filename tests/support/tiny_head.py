"""Random EAGLE-3 heads, as GGUF files for the tiny Llama."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiny_gguf import Shape, begin, finish, write_vocabulary

TARGET = Shape(layers=4)  # a tiny Llama with enough layers to read three of
LAYERS = [0, 1, 3]
WIDTH, HEADS, KV_HEADS, HIDDEN = 32, 2, 1, 64


def head_tensors(shape: Shape, tokens: int, width: int = WIDTH) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(shape.seed)
    size = width // HEADS
    shapes = {
        "fc.weight": (width, 3 * shape.width),
        "token_embd.weight": (tokens, width),
        "output.weight": (tokens, width),
        "blk.0.attn_q.weight": (HEADS * size, 2 * width),
        "blk.0.attn_k.weight": (KV_HEADS * size, 2 * width),
        "blk.0.attn_v.weight": (KV_HEADS * size, 2 * width),
        "blk.0.attn_output.weight": (width, HEADS * size),
        "blk.0.ffn_gate.weight": (HIDDEN, width),
        "blk.0.ffn_up.weight": (HIDDEN, width),
        "blk.0.ffn_down.weight": (width, HIDDEN),
    }
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm")
    found: dict[str, NDArray[Any]] = {f"{name}.weight": np.ones(width, np.float32) for name in norms}
    for name, (rows, columns) in shapes.items():
        found[name] = (rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)
    return found


def write_head(
    path: Path,
    shape: Shape = TARGET,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any] | None] | None = None,
    width: int = WIDTH,
) -> Path:
    """A head for `write_model(..., TARGET)` with the whole vocabulary; `metadata` and `tensors` as there."""
    sizes = {"width": width, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS}
    writer = begin(path, "eagle3", context=128, layers=1, **sizes)
    writer.add_rope_dimension_count(width // HEADS)
    writer.add_array("eagle3.target_layers", LAYERS)
    writer.add_uint32("eagle3.target_hidden_size", shape.width)
    tokens = write_vocabulary(writer, shape)
    return finish(writer, path, {**head_tensors(shape, tokens, width), **(tensors or {})}, metadata)

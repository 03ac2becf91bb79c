"""Random EAGLE-3 heads: as Hugging Face folders for a target's folder, and as GGUF files for the tiny Llama."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tiny_gguf import Shape, begin, finish, write_vocabulary

TARGET = Shape(layers=4)  # a tiny Llama with enough layers to read three of
LAYERS = [0, 1, 3]
WIDTH, HEADS, KV_HEADS, HIDDEN = 32, 2, 1, 64


def write_checkpoint(
    folder: Path,
    target: Path,
    *,
    drafted: int | None = 500,
    owns: tuple[str, ...] = ("embed_tokens.weight", "lm_head.weight"),
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any] | None] | None = None,
    seed: int = 0,
) -> Path:
    """A head for the model folder `target` that proposes `drafted` tokens (None: all) and `owns` these tables.

    `config` and `tensors` replace what a sound folder would hold, None leaves a tensor out.
    """
    rng = np.random.default_rng(seed)
    of_target = json.loads((target / "config.json").read_text())
    width, vocabulary = of_target["hidden_size"], of_target["vocab_size"]
    heads, kv_heads, size, hidden = 4, 2, width // 4, 96

    def draw(rows: int, columns: int) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)

    def norm(length: int) -> NDArray[np.float32]:
        return (1 + rng.standard_normal(length) / 8).astype(np.float32)

    found: dict[str, NDArray[Any] | None] = {
        "fc.weight": draw(width, 3 * width),
        "norm.weight": norm(width),
        "midlayer.input_layernorm.weight": norm(width),
        "midlayer.hidden_norm.weight": norm(width),
        "midlayer.post_attention_layernorm.weight": norm(width),
        "midlayer.self_attn.q_proj.weight": 2 * draw(heads * size, 2 * width),
        "midlayer.self_attn.k_proj.weight": 2 * draw(kv_heads * size, 2 * width),
        "midlayer.self_attn.v_proj.weight": draw(kv_heads * size, 2 * width),
        "midlayer.self_attn.o_proj.weight": draw(width, heads * size),
        "midlayer.mlp.gate_proj.weight": draw(hidden, width),
        "midlayer.mlp.up_proj.weight": draw(hidden, width),
        "midlayer.mlp.down_proj.weight": draw(width, hidden),
    }
    if "embed_tokens.weight" in owns:
        found["embed_tokens.weight"] = draw(vocabulary, width) * 8
    if "lm_head.weight" in owns:
        found["lm_head.weight"] = draw(drafted or vocabulary, width) * 3
    if drafted is not None:
        ids = np.sort(rng.permutation(vocabulary)[:drafted])
        found |= {"d2t": ids - np.arange(drafted), "t2d": np.isin(np.arange(vocabulary), ids)}
    found |= dict(tensors or {})
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: values for name, values in found.items() if values is not None}, folder / "model.safetensors")
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocabulary,
        "draft_vocab_size": drafted or vocabulary,
        **(config or {}),
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


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

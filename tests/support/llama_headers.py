"""GGUF files with the header of a large Llama and a hole where its weights would be."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from tiny_gguf import begin


class Size(NamedTuple):
    """Of a Llama: layers, hidden size, inner size, numbers of heads."""

    layers: int
    width: int
    inner: int
    heads: int


LLAMA_70B, LLAMA_8B = Size(80, 8192, 28672, 64), Size(32, 4096, 14336, 32)
KV, VOCABULARY = 1024, 4000


def write_header(path: Path, size: Size) -> int:
    """A header like that of a Llama 3 in Q4_K, over a hole of a file; the bytes of its weights."""
    layers, width, inner, heads = size
    sizes = {"layers": layers, "width": width, "hidden": inner, "heads": heads, "kv_heads": 8}
    writer = begin(path, "llama", context=131072, **sizes)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    q4, f32 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.F32
    shapes = {"token_embd": (VOCABULARY, width), "output": (VOCABULARY, width)}
    for layer in range(layers):
        rows = {"attn_q": width, "attn_k": KV, "attn_v": KV, "attn_output": width, "ffn_gate": inner, "ffn_up": inner}
        shapes |= {f"blk.{layer}.{name}": (count, width) for name, count in rows.items()}
        shapes[f"blk.{layer}.ffn_down"] = (width, inner)
    total = 0
    for name, (rows_, columns) in shapes.items():
        num_bytes = rows_ * columns // 256 * 144
        writer.add_tensor_info(f"{name}.weight", (rows_, columns // 256 * 144), np.dtype(np.uint8), num_bytes, q4)
        total += -(-num_bytes // 32) * 32
    writer.add_tensor_info("output_norm.weight", (width,), np.dtype(np.float32), 4 * width, f32)
    total += 4 * width
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + total + 64)
    return total

"""A random Gemma 4 and its drafter as GGUF files, and both once more in numpy.

The target's last two layers are those whose keys and values the drafter reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tiny_gguf import Shape, add_tensor, replace_metadata, write_vocabulary

Floats = NDArray[np.float32]
TARGET, DRAFTER = "gemma4", "gemma4-assistant"
EPS, BASE, BASE_SLIDING, NOT_ROTATED = 1e-6, 1_000_000.0, 10_000.0, 1e30


@dataclass(frozen=True)
class GemmaShape:
    """Sizes of both; every second layer attends to a window only.

    `sharing`: last layers of the target without keys and values of their own, which the numpy twin does not know.
    """

    width: int = 64
    drafter_width: int = 32
    layers: int = 4
    sharing: int = 0
    drafter_layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    size: int = 32
    size_sliding: int = 16
    hidden: int = 96
    window: int = 512
    context: int = 512
    merges: int = 40
    seed: int = 0

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0

    def size_of(self, layer: int) -> int:
        return self.size_sliding if self.is_sliding(layer) else self.size


def draw(rng: np.random.Generator, rows: int, columns: int, scale: float = 1.0) -> Floats:
    return (rng.standard_normal((rows, columns)) * scale / math.sqrt(columns)).astype(np.float32)


def _norm(rng: np.random.Generator, length: int) -> Floats:
    return (1 + rng.standard_normal(length) / 8).astype(np.float32)


def _layer(rng: np.random.Generator, shape: GemmaShape, layer: int, width: int, *, has_keys: bool) -> dict[str, Floats]:
    size = shape.size_of(layer)
    found = {
        "attn_norm.weight": _norm(rng, width),
        "attn_q.weight": draw(rng, shape.heads * size, width),
        "attn_q_norm.weight": _norm(rng, size),
        "attn_output.weight": draw(rng, width, shape.heads * size),
        "post_attention_norm.weight": _norm(rng, width),
        "ffn_norm.weight": _norm(rng, width),
        "ffn_gate.weight": draw(rng, shape.hidden, width),
        "ffn_up.weight": draw(rng, shape.hidden, width),
        "ffn_down.weight": draw(rng, width, shape.hidden),
        "post_ffw_norm.weight": _norm(rng, width),
        "layer_output_scale.weight": np.array([0.8], np.float32),
    }
    if has_keys:
        found["attn_k.weight"] = draw(rng, shape.kv_heads * size, width)
        found["attn_v.weight"] = draw(rng, shape.kv_heads * size, width)
        found["attn_k_norm.weight"] = _norm(rng, size)
    return {f"blk.{layer}.{name}": values for name, values in found.items()}


def _factors(shape: GemmaShape) -> Floats:
    """Of full layers: the second half of the pairs is not rotated."""
    pairs = shape.size // 2
    return np.where(np.arange(pairs) < pairs // 2, 1.0, NOT_ROTATED).astype(np.float32)


def target_tensors(shape: GemmaShape, tokens: int) -> dict[str, Floats]:
    rng = np.random.default_rng(shape.seed)
    found = {"token_embd.weight": draw(rng, tokens, shape.width, 3.0), "output_norm.weight": _norm(rng, shape.width)}
    found["rope_freqs.weight"] = _factors(shape)
    for layer in range(shape.layers):
        found |= _layer(rng, shape, layer, shape.width, has_keys=True)
    return found


def drafter_tensors(shape: GemmaShape, tokens: int) -> dict[str, Floats]:
    rng, width = np.random.default_rng(shape.seed + 1), shape.drafter_width
    found = {"token_embd.weight": draw(rng, tokens, width, 3.0), "output_norm.weight": _norm(rng, width)}
    found["rope_freqs.weight"] = _factors(shape)
    found["nextn.pre_projection.weight"] = draw(rng, width, 2 * shape.width)
    found["nextn.post_projection.weight"] = draw(rng, shape.width, width)
    for layer in range(shape.drafter_layers):
        found |= _layer(rng, shape, layer, width, has_keys=False)
    return found


def write_target(path: Path, shape: GemmaShape = GemmaShape(), *, metadata: Mapping[str, Any] | None = None) -> Path:
    writer, tokens = _begin(path, TARGET, shape, shape.layers, shape.width)
    writer.add_uint32(f"{TARGET}.embedding_length_per_layer_input", 0)
    writer.add_uint32(f"{TARGET}.attention.shared_kv_layers", shape.sharing)
    writer.add_float32(f"{TARGET}.final_logit_softcapping", 30.0)
    return _finish(writer, path, target_tensors(shape, tokens), metadata)


def write_drafter(
    path: Path,
    shape: GemmaShape = GemmaShape(),
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Floats | None] | None = None,
) -> Path:
    """`metadata` and `tensors` replace what a sound file holds, None leaves an entry out."""
    writer, tokens = _begin(path, DRAFTER, shape, shape.drafter_layers, shape.drafter_width)
    writer.add_uint32(f"{DRAFTER}.embedding_length_out", shape.width)
    writer.add_uint32(f"{DRAFTER}.nextn_predict_layers", shape.drafter_layers)
    found: dict[str, Floats | None] = {**drafter_tensors(shape, tokens), **(tensors or {})}
    return _finish(writer, path, {name: values for name, values in found.items() if values is not None}, metadata)


def _begin(path: Path, kind: str, shape: GemmaShape, layers: int, width: int) -> tuple[gguf.GGUFWriter, int]:
    writer = gguf.GGUFWriter(path, kind)
    writer.add_name("tiny")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.size)
    writer.add_value_length(shape.size)
    writer.add_uint32(f"{kind}.attention.key_length_swa", shape.size_sliding)
    writer.add_uint32(f"{kind}.attention.value_length_swa", shape.size_sliding)
    writer.add_sliding_window(shape.window)
    writer.add_array(f"{kind}.attention.sliding_window_pattern", [shape.is_sliding(n) for n in range(layers)])
    writer.add_rope_dimension_count(shape.size)
    writer.add_uint32(f"{kind}.rope.dimension_count_swa", shape.size_sliding)
    writer.add_rope_freq_base(BASE)
    writer.add_float32(f"{kind}.rope.freq_base_swa", BASE_SLIDING)
    writer.add_layer_norm_rms_eps(EPS)
    return writer, write_vocabulary(writer, Shape(merges=shape.merges))


def _finish(
    writer: gguf.GGUFWriter, path: Path, tensors: Mapping[str, Floats], metadata: Mapping[str, Any] | None
) -> Path:
    replace_metadata(writer, metadata or {})
    for name, values in tensors.items():
        add_tensor(writer, name, values, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# The same in numpy.


def _normed(x: Floats, weight: Floats | None = None) -> Floats:
    found: Floats = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    return found if weight is None else found * weight


def _gelu(x: Floats) -> Floats:
    found: Floats = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return found


def _rotated(x: Floats, positions: NDArray[np.int64], shape: GemmaShape, layer: int) -> Floats:
    """[n, heads, size]."""
    half = x.shape[-1] // 2
    base = BASE_SLIDING if shape.is_sliding(layer) else BASE
    factors = 1.0 if shape.is_sliding(layer) else _factors(shape)
    angles = positions[:, None] * (base ** (-np.arange(half) / half) / factors)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1)


class Twin:
    """Both models over one text."""

    def __init__(self, shape: GemmaShape, tokens: int) -> None:
        self.shape = shape
        self.target, self.drafter = target_tensors(shape, tokens), drafter_tensors(shape, tokens)
        self.keys: list[Floats] = []
        self.values: list[Floats] = []

    def read(self, token_ids: list[int]) -> tuple[Floats, Floats]:
        """(logits, hidden states) of a text; its keys and values are kept for the drafter."""
        shape, weights, count = self.shape, self.target, len(token_ids)
        positions = np.arange(count)
        self.keys, self.values = [], []
        x = weights["token_embd.weight"][token_ids] * np.float32(np.sqrt(shape.width))
        for layer in range(shape.layers):
            own, size = self._own(weights, layer), shape.size_of(layer)
            inner = _normed(x, own["attn_norm"])
            keys = (inner @ own["attn_k"].T).reshape(count, shape.kv_heads, size)
            self.keys.append(_rotated(_normed(keys, own["attn_k_norm"]), positions, shape, layer))
            self.values.append(_normed((inner @ own["attn_v"].T).reshape(count, shape.kv_heads, size)))
            x = self._rest(x, inner, own, layer, positions, layer)
        hidden = _normed(x, weights["output_norm.weight"])
        logits = 30 * np.tanh(hidden @ weights["token_embd.weight"].T / 30)
        return logits, hidden

    def draft(self, token_id: int, state: Floats, position: int) -> tuple[Floats, Floats]:
        """(logits, the next state) of one step; `position` is that of the last token of the text."""
        shape, weights = self.shape, self.drafter
        embedded = self.target["token_embd.weight"][[token_id]] * np.float32(np.sqrt(shape.width))
        x = np.concatenate((embedded, state[None]), axis=1) @ weights["nextn.pre_projection.weight"].T
        for layer in range(shape.drafter_layers):
            own = self._own(weights, layer)
            inner = _normed(x, own["attn_norm"])
            read = shape.layers - (2 if shape.is_sliding(layer) else 1)
            x = self._rest(x, inner, own, layer, np.array([position]), read)
        x = _normed(x, weights["output_norm.weight"])
        return (x @ weights["token_embd.weight"].T)[0], (x @ weights["nextn.post_projection.weight"].T)[0]

    def _own(self, weights: Mapping[str, Floats], layer: int) -> dict[str, Floats]:
        begin = f"blk.{layer}."
        return {n.removeprefix(begin).removesuffix(".weight"): v for n, v in weights.items() if n.startswith(begin)}

    def _rest(
        self, x: Floats, inner: Floats, own: Mapping[str, Floats], layer: int, positions: NDArray[Any], read: int
    ) -> Floats:
        """A layer behind its keys and values; those of the target's layer `read` are attended to."""
        shape, size = self.shape, self.shape.size_of(layer)
        queries = (inner @ own["attn_q"].T).reshape(len(x), shape.heads, size)
        queries = _rotated(_normed(queries, own["attn_q_norm"]), positions, shape, layer)
        per_key = shape.heads // shape.kv_heads
        keys, values = (each[read].repeat(per_key, axis=1) for each in (self.keys, self.values))
        scores = np.einsum("qhd,khd->hqk", queries, keys)
        distance = positions[:, None] - np.arange(len(keys))[None]
        is_seen = (distance >= 0) & ((distance < shape.window) | (not shape.is_sliding(layer)))
        scores = np.where(is_seen, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", shares, values).reshape(len(x), -1) @ own["attn_output"].T
        x = x + _normed(attended, own["post_attention_norm"])
        inner = _normed(x, own["ffn_norm"])
        fed = (_gelu(inner @ own["ffn_gate"].T) * (inner @ own["ffn_up"].T)) @ own["ffn_down"].T
        return (x + _normed(fed, own["post_ffw_norm"])) * own["layer_output_scale"]

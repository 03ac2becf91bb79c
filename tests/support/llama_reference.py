"""A Llama forward pass in plain numpy, float64, straight from the paper's formulas: what conversions are checked by."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    found: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return found


def rotate(x: Array, theta: float) -> Array:
    """Rotary embedding of [length, heads, head_dim], first half paired with second half."""
    length, _, size = x.shape
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, size, 2) / size)[None, :]
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def attention(x: Array, weights: dict[str, Array], prefix: str, config: dict[str, Any]) -> Array:
    length, size = x.shape[0], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q = rotate((x @ weights[f"{prefix}q_proj.weight"].T).reshape(length, heads, size), config["rope_theta"])
    k = rotate((x @ weights[f"{prefix}k_proj.weight"].T).reshape(length, kv_heads, size), config["rope_theta"])
    v = (x @ weights[f"{prefix}v_proj.weight"].T).reshape(length, kv_heads, size)
    k, v = np.repeat(k, heads // kv_heads, axis=1), np.repeat(v, heads // kv_heads, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(size)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    mixed: Array = np.einsum("hij,jhd->ihd", probs, v).reshape(length, heads * size)
    return mixed @ weights[f"{prefix}o_proj.weight"].T


def logits(weights: dict[str, Array], config: dict[str, Any], token_ids: list[int]) -> Array:
    """Scores [len(token_ids), vocab] of a checkpoint with Hugging Face's names and a tied head."""
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][token_ids]
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        normed = rms_norm(x, weights[f"{prefix}input_layernorm.weight"], eps)
        x = x + attention(normed, weights, f"{prefix}self_attn.", config)
        normed = rms_norm(x, weights[f"{prefix}post_attention_layernorm.weight"], eps)
        gate = normed @ weights[f"{prefix}mlp.gate_proj.weight"].T
        up = normed @ weights[f"{prefix}mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{prefix}mlp.down_proj.weight"].T
    return rms_norm(x, weights["model.norm.weight"], eps) @ weights["model.embed_tokens.weight"].T

"""The layer of an EAGLE head as its papers define it, over all pairs of a text at once: what others must agree with.

EAGLE: arXiv 2401.15077. EAGLE-3 (arXiv 2503.01840) attends over the normed embedding and the normed state side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.formats.head_file import HeadManifest

Floats = NDArray[Any]


def normed(x: Floats, weight: Floats, epsilon: float) -> Floats:
    found: Floats = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + epsilon) * weight
    return found


def layer(
    sizes: HeadManifest,
    arrays: Mapping[str, Floats],
    states: Floats,
    embedded: Floats,
    sees: NDArray[np.bool_],
    *,
    is_third: bool = False,
) -> tuple[Floats, Floats]:
    """(states that follow, states that the head scores) [n, width] of pairs, each of which `sees` [n, n] some.

    `arrays` by the names of a heads file, those of EAGLE-3 (`is_third`) like them; `states`, `embedded` [n, width] of
    the pairs. A pair's position is the number of those before it that it sees.
    """
    epsilon = sizes.norm_eps
    if is_third:
        state = normed(states, arrays["state_norm"], epsilon)
        given = np.concatenate((normed(embedded, arrays["embedding_norm"], epsilon), state), axis=1)
        x = states
    else:
        x = np.concatenate((states, embedded), axis=1) @ arrays["fc"].T
        given = normed(x, arrays["attention_norm"], epsilon)
    frequencies = sizes.rope_theta ** -(np.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    angles = (sees.sum(axis=1) - 1)[:, None] * frequencies
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    queries, keys, values = ((given @ arrays[f"{name}_proj"].T).reshape(len(x), -1, sizes.head_dim) for name in "qkv")

    def rotated(y: Floats) -> Floats:
        first, second = np.split(y, 2, axis=-1)
        return np.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1)

    group = sizes.heads // sizes.kv_heads
    keys, values = rotated(keys).repeat(group, axis=1), values.repeat(group, axis=1)
    scores = np.einsum("qhd,khd->hqk", rotated(queries), keys) / np.sqrt(sizes.head_dim)
    scores = np.where(sees, scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=2, keepdims=True))
    shares /= shares.sum(axis=2, keepdims=True)
    x = x + np.einsum("hqk,khd->qhd", shares, values).reshape(len(x), -1) @ arrays["o_proj"].T
    inner = normed(x, arrays["mlp_norm"], epsilon)
    gate = inner @ arrays["gate_proj"].T
    x = x + (gate / (1 + np.exp(-gate)) * (inner @ arrays["up_proj"].T)) @ arrays["down_proj"].T
    last = normed(x, arrays["norm"], epsilon)
    return (x if is_third else last), last

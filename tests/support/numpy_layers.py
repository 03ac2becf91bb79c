"""Parts of layers in numpy, written from their definitions: what kernels, heads and other engines must agree with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.formats.head_file import HeadManifest

Floats = NDArray[Any]


def normed(x: Floats, weight: Floats | float = 1.0, epsilon: float = 1e-5) -> Floats:
    found: Floats = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + epsilon) * weight
    return found


def rotated(x: Floats, places: Floats | int, frequencies: Floats, scale: float = 1.0) -> Floats:
    """Rotary positions of [n, heads, size] at `places` [n]; the pairs of a head are its halves."""
    angles = np.multiply.outer(np.broadcast_to(places, len(x)), frequencies)[:, None]
    cos, sin = scale * np.cos(angles), scale * np.sin(angles)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1)


def attended(
    queries: Floats, keys: Floats, values: Floats, sees: NDArray[np.bool_], scale: float, sinks: Floats | None = None
) -> Floats:
    """[n, heads * size] of queries [n, heads, size] that each `sees` [n, m] some of keys and values [m, fewer, size].

    `sinks` [heads]: logits of nothing, which take a part of the attention.
    """
    keys, values = (each.repeat(queries.shape[1] // each.shape[1], axis=1) for each in (keys, values))
    scores = np.where(sees, np.einsum("qhd,khd->hqk", queries, keys) * scale, -np.inf)
    most = scores.max(axis=-1, keepdims=True)
    shares = np.exp(scores - most)
    nothing = 0.0 if sinks is None else np.exp(sinks[:, None, None] - most)
    shares = shares / (shares.sum(axis=-1, keepdims=True) + nothing)
    found: Floats = np.einsum("hqk,khd->qhd", shares, values).reshape(len(queries), -1)
    return found


def fed_forward(x: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    """Behind matrices [outputs, inputs], with SiLU."""
    opened = x @ gate.T
    found: Floats = (opened / (1 + np.exp(-opened)) * (x @ up.T)) @ down.T
    return found


def eagle_layer(
    sizes: HeadManifest,
    arrays: Mapping[str, Floats],
    states: Floats,
    embedded: Floats,
    sees: NDArray[np.bool_],
    *,
    is_third: bool = False,
) -> tuple[Floats, Floats]:
    """(states that follow, states that the head scores) [n, width] of pairs, each of which `sees` [n, n] some.

    EAGLE: arXiv 2401.15077. EAGLE-3 (arXiv 2503.01840) attends over the normed embedding and the normed state side by
    side. `arrays` by the names of a heads file, those of EAGLE-3 (`is_third`) like them; `states`, `embedded`
    [n, width] of the pairs. A pair's position is the number of those before it that it sees.
    """
    epsilon = sizes.norm_eps
    if is_third:
        state = normed(states, arrays["state_norm"], epsilon)
        given = np.concatenate((normed(embedded, arrays["embedding_norm"], epsilon), state), axis=1)
        x = states
    else:
        x = np.concatenate((states, embedded), axis=1) @ arrays["fc"].T
        given = normed(x, arrays["attention_norm"], epsilon)
    places, frequencies = sees.sum(axis=1) - 1, sizes.rope_theta ** -(np.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    queries, keys, values = ((given @ arrays[f"{name}_proj"].T).reshape(len(x), -1, sizes.head_dim) for name in "qkv")
    queries, keys = (rotated(each, places, frequencies) for each in (queries, keys))
    x = x + attended(queries, keys, values, sees, sizes.head_dim**-0.5) @ arrays["o_proj"].T
    inner = normed(x, arrays["mlp_norm"], epsilon)
    x = x + fed_forward(inner, arrays["gate_proj"], arrays["up_proj"], arrays["down_proj"])
    last = normed(x, arrays["norm"], epsilon)
    return (x if is_third else last), last

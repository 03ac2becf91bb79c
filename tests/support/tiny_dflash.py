"""Random DFlash and DSpark heads as GGUF files for the tiny Llama, and what they compute, written out in numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from numpy_layers import attended, fed_forward, normed, rotated
from tiny_gguf import Shape, begin, finish, write_vocabulary

TARGET = Shape(layers=4)  # a tiny Llama with enough layers to read three of
LAYERS = [0, 2, 3]
WIDTH, MASK_ID, NUM_TOKENS = TARGET.width, 290, 299
TAPS, GROUP, RANK = 3, 16, 8  # of DFlash2
EPSILON = 1e-5
FREQUENCIES = 10000.0 ** (-np.arange(8) / 8)  # of the halves of a head
Array = NDArray[np.float32]


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head; `markov` rank of DSpark's head, 0 for none; `drafted` tokens it proposes, None for all.

    `windowed`: which layers see the last `window` tokens only.
    """

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    hidden: int = 96
    block: int = 6
    target_layers: tuple[int, ...] = tuple(LAYERS)
    markov: int = 0
    has_confidence: bool = False
    from_anchor: bool = True
    candidates: int = 0  # of DFlash2's rows
    drafted: int | None = None
    causal: bool | None = None
    window: int = 0
    windowed: tuple[bool, ...] = ()
    has_sinks: bool = False
    has_extras: bool = False  # norms behind attention and feed-forward, sinks, a scale; values are the keys
    context: int = 256
    seed: int = 0
    weights: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32


def write_dflash(
    path: Path,
    shape: HeadShape = HeadShape(),
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any] | None] | None = None,
) -> Path:
    """A head for `write_model(..., TARGET)`.

    `metadata` and `tensors` replace what a sound file would hold, None leaves an entry out: this makes faulty files,
    and heads that share the target's tables.
    """
    sizes = {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads}
    writer = begin(path, "dflash", context=shape.context, width=WIDTH, size=shape.size, epsilon=EPSILON, **sizes)
    writer.add_uint32("dflash.block_size", shape.block)
    writer.add_array("dflash.target_layers", list(shape.target_layers))
    if shape.causal is not None:
        writer.add_causal_attention(shape.causal)
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_sliding_window_pattern(list(shape.windowed))
    if shape.candidates:
        sizes = {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK}
        for name, size in {**sizes, "selector_top_k": shape.candidates}.items():
            writer.add_uint32(f"dflash.{name}", size)
    if shape.markov:
        writer.add_bool("dflash.sample_from_anchor", shape.from_anchor)
    write_vocabulary(writer, TARGET)
    writer.add_mask_token_id(MASK_ID)
    return finish(writer, path, {**_tensors(shape), **(tensors or {})}, metadata, shape.weights)


def _tensors(shape: HeadShape) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(shape.seed)
    drafted = shape.drafted or NUM_TOKENS

    def draw(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) * (1.5 / math.sqrt(columns))).astype(np.float32)

    def vector(length: int, middle: float = 1.0) -> Array:
        return (middle + rng.standard_normal(length) / 8).astype(np.float32)

    found: dict[str, NDArray[Any]] = {
        "token_embd.weight": 4 * draw(NUM_TOKENS, WIDTH),
        "output.weight": 2 * draw(drafted, WIDTH),
        "fc.weight": draw(WIDTH, len(shape.target_layers) * WIDTH),
        "enc.output_norm.weight": vector(WIDTH),
        "output_norm.weight": vector(WIDTH),
    }
    for layer in range(shape.layers):
        keys = shape.kv_heads * shape.size
        block = {
            "attn_norm": vector(WIDTH),
            "attn_q": draw(shape.heads * shape.size, WIDTH),
            "attn_k": draw(keys, WIDTH),
            "attn_v": draw(keys, WIDTH),
            "attn_output": draw(WIDTH, shape.heads * shape.size),
            "attn_q_norm": vector(shape.size, 1.5),
            "attn_k_norm": vector(shape.size, 1.5),
            "ffn_norm": vector(WIDTH),
            "ffn_gate": draw(shape.hidden, WIDTH),
            "ffn_up": draw(shape.hidden, WIDTH),
            "ffn_down": draw(WIDTH, shape.hidden),
        }
        if shape.candidates:
            for part in ("attn", "ffn"):
                block[f"{part}_conv_proj"] = draw(2 * TAPS * WIDTH // GROUP, WIDTH) / np.float32(3)
                found[f"blk.{layer}.{part}_conv_base"] = draw(2 * TAPS, WIDTH).reshape(2, TAPS, WIDTH) + np.float32(0.3)
        if shape.has_sinks:
            block["attn_sinks"] = vector(shape.heads)
        if shape.has_extras:
            del block["attn_v"]
            block |= {"post_attention_norm": vector(WIDTH), "post_ffw_norm": vector(WIDTH)}
            block |= {"attn_sinks": vector(shape.heads), "layer_output_scale": vector(1)}
        found |= {f"blk.{layer}.{name}.weight": values for name, values in block.items()}
    if shape.candidates:
        tables = {
            "predecessor": draw(NUM_TOKENS, RANK),
            "successor": draw(NUM_TOKENS, RANK),
            "hidden": draw(RANK, WIDTH),
        }
        found |= {f"selector_{name}.weight": 3 * values for name, values in tables.items()}
    if shape.drafted is not None:
        found["d2t"] = np.sort(rng.permutation(NUM_TOKENS)[: shape.drafted]).astype(np.int64)
    if shape.markov:
        found["markov_w1.weight"] = 4 * draw(NUM_TOKENS, shape.markov)
        found["markov_w2.weight"] = 2 * draw(drafted, shape.markov)
        if shape.has_confidence:
            found["conf_proj.weight"] = draw(1, WIDTH + shape.markov)
            found["conf_proj.bias"] = vector(1, 0.2)
    return found


class NumpyBlock:
    """What a head in `path` computes, one token after the other; `tables` are those of a target that it shares."""

    def __init__(self, path: Path, shape: HeadShape, tables: Mapping[str, Array] | None = None) -> None:
        stored = gguf.GGUFReader(path).tensors
        self._tensors = {
            **(tables or {}),
            **{tensor.name: np.array(tensor.data).reshape(tensor.shape[::-1]) for tensor in stored},
        }
        self.shape = shape
        self.cache: list[dict[int, tuple[Array, Array]]] = [{} for _ in range(shape.layers)]  # by position

    def _of(self, layer: int, name: str) -> Array:
        found: Array = self._tensors[f"blk.{layer}.{name}.weight"]
        return found

    def inject(self, features: Array, position: int) -> None:
        """Cache the target's `features` [n, layers * width] of the tokens from `position` on."""
        for offset, row in enumerate(features):
            fused = normed(self._tensors["fc.weight"] @ row) * self._tensors["enc.output_norm.weight"]
            for layer in range(self.shape.layers):
                self.cache[layer][position + offset] = self._keys(layer, fused, position + offset)

    def _keys(self, layer: int, x: Array, position: int) -> tuple[Array, Array]:
        """Keys and values [kv_heads, size] of one token."""
        keys = normed((self._of(layer, "attn_k") @ x).reshape(-1, self.shape.size)) * self._of(layer, "attn_k_norm")
        return rotated(keys[None], position, FREQUENCIES)[0], (self._of(layer, "attn_v") @ x).reshape(
            -1, self.shape.size
        )

    def block(self, token_id: int, position: int) -> tuple[Array, Array | None]:
        """Logits [rows that propose, vocabulary] behind `token_id`, and confidences [rows that propose]."""
        shape = self.shape
        xs = self._tensors["token_embd.weight"][[token_id] + [MASK_ID] * (shape.block - 1)]
        for layer in range(shape.layers):
            xs = self._layer(layer, xs, position)
        states = normed(xs) * self._tensors["output_norm.weight"]
        scores = states @ self._tensors["output.weight"].T
        if shape.candidates:
            return self._path(token_id, states[1:], scores[1:]), None
        if shape.markov:
            return self._markov(token_id, states, scores)
        return self._spread(scores, -np.inf)[1:], None

    def _layer(self, layer: int, xs: Array, position: int) -> Array:
        inputs, kernels = self._convolved(layer, "attn", normed(xs) * self._of(layer, "attn_norm"))
        known = dict(self.cache[layer])
        for row, x in enumerate(inputs):
            known[position + row] = self._keys(layer, x, position + row)
        attended = np.stack([self._attended(layer, x, position + row, known) for row, x in enumerate(inputs)])
        xs = xs + self._convolved(layer, "attn", attended @ self._of(layer, "attn_output").T, kernels)[0]
        inputs, kernels = self._convolved(layer, "ffn", normed(xs) * self._of(layer, "ffn_norm"))
        made = fed_forward(inputs, *(self._of(layer, f"ffn_{name}") for name in ("gate", "up", "down")))
        found: Array = xs + self._convolved(layer, "ffn", made, kernels)[0]
        return found

    def _convolved(self, layer: int, part: str, xs: Array, kernels: Array | None = None) -> tuple[Array, Array | None]:
        """DFlash2's convolution in front, and its kernels [block, 2, taps, width]; or with these the one behind."""
        if not self.shape.candidates:
            return xs, None
        side = int(kernels is not None)
        if kernels is None:
            made = (xs @ self._of(layer, f"{part}_conv_proj").T).reshape(len(xs), 2, TAPS, WIDTH // GROUP)
            kernels = made.repeat(GROUP, axis=3) + self._tensors[f"blk.{layer}.{part}_conv_base"]
        found = np.zeros_like(xs)
        for row in range(len(xs)):
            for tap in range(min(TAPS, row + 1)):
                found[row] += kernels[row, side, tap] * xs[row - tap]
        return found, kernels

    def _path(self, token_id: int, states: Array, scores: Array) -> Array:
        """DFlash2's scores of each row's candidates behind the best one of the row before."""
        tables = [self._tensors[f"selector_{name}.weight"] for name in ("predecessor", "successor", "hidden")]
        drafted = self._tensors["d2t"] if self.shape.drafted is not None else np.arange(NUM_TOKENS)
        found = np.full((len(scores), NUM_TOKENS), -np.inf, np.float32)
        for row, (state, each) in enumerate(zip(states, scores, strict=True)):
            for place in np.argsort(each)[-self.shape.candidates :]:
                follows = tables[1][drafted[place]] @ (tables[0][token_id] * (tables[2] @ state))
                found[row, drafted[place]] = each[place] + follows
            token_id = int(found[row].argmax())
        return found

    def _attended(self, layer: int, x: Array, position: int, known: dict[int, tuple[Array, Array]]) -> Array:
        """What the row of `x` at `position` reads from all tokens that it sees [heads * size]."""
        shape = self.shape
        queries = normed((self._of(layer, "attn_q") @ x).reshape(1, -1, shape.size)) * self._of(layer, "attn_q_norm")
        window = shape.window if shape.window and shape.windowed[layer] else 1 << 30
        seen = [at for at in known if position - at < window and (at <= position or not shape.causal)]
        keys, values = (np.stack([known[at][which] for at in seen]) for which in (0, 1))
        sinks = self._of(layer, "attn_sinks") if shape.has_sinks else None
        sees = np.ones((1, len(seen)), np.bool_)
        queries = rotated(queries, position, FREQUENCIES)
        (found,) = attended(queries, keys, values, sees, shape.size**-0.5, sinks)
        return np.asarray(found)

    def _markov(self, token_id: int, states: Array, scores: Array) -> tuple[Array, Array | None]:
        first, before = (0 if self.shape.from_anchor else 1), token_id
        rows, confidences = [], []
        for state, row in zip(states[first:], scores[first:], strict=True):
            known = self._tensors["markov_w1.weight"][before]
            rows.append(self._spread((row + self._tensors["markov_w2.weight"] @ known)[np.newaxis], -np.inf)[0])
            if self.shape.has_confidence:
                read = np.concatenate((state, known)) @ self._tensors["conf_proj.weight"].reshape(-1)
                confidences.append(1 / (1 + np.exp(-read - self._tensors["conf_proj.bias"][0])))
            before = int(rows[-1].argmax())
        return np.stack(rows), np.array(confidences) if confidences else None

    def _spread(self, scores: Array, missing: float) -> Array:
        """`scores` [n, drafted tokens] as [n, vocabulary]."""
        if self.shape.drafted is None:
            return scores
        found = np.full((len(scores), NUM_TOKENS), missing, np.float32)
        found[:, self._tensors["d2t"]] = scores
        return found

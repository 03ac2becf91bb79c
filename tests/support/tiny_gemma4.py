"""A random Gemma 4 and the drafter for it as GGUF files, and both once more in numpy.

The target's last two layers are those whose keys and values the drafter reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tiny_mixtures
from tiny_gguf import Shape, begin, finish, write_vocabulary
from tiny_mixtures import NOT_ROTATED, Case, Doubles, Floats, add_windows

GEMMA = Case("gemma4", 4, size=32, size_windowed=16, window=512, window_every=2)
DRAFTER, LAYERS, WIDTH = "gemma4-assistant", 4, 32


def drafter_tensors(case: Case) -> dict[str, Floats]:
    rng = np.random.default_rng(case.seed + 1)

    def draw(rows: int, columns: int, scale: float = 1.0) -> Floats:
        return (rng.standard_normal((rows, columns)) * scale / math.sqrt(columns)).astype(np.float32)

    def norm(length: int) -> Floats:
        return (1 + rng.standard_normal(length) / 8).astype(np.float32)

    pairs = case.size // 2
    found = {
        "token_embd.weight": draw(case.tokens(), WIDTH, 3.0),
        "output_norm.weight": norm(WIDTH),
        "rope_freqs.weight": np.where(np.arange(pairs) < pairs // 4, 1.0, NOT_ROTATED).astype(np.float32),
        "nextn.pre_projection.weight": draw(WIDTH, 2 * case.width),
        "nextn.post_projection.weight": draw(case.width, WIDTH),
    }
    for layer in range(LAYERS):
        size = case.size_of(layer)
        own = {
            "attn_q.weight": draw(case.heads * size, WIDTH),
            "attn_q_norm.weight": norm(size) * np.float32(2 * size**-0.5),
            "attn_output.weight": draw(WIDTH, case.heads * size),
            "ffn_gate.weight": draw(case.inner, WIDTH),
            "ffn_up.weight": draw(case.inner, WIDTH),
            "ffn_down.weight": draw(WIDTH, case.inner),
            "layer_output_scale.weight": np.array([0.8], np.float32),
        }
        own |= {f"{name}.weight": norm(WIDTH) for name in ("attn_norm", "post_attention_norm")}
        own |= {f"{name}.weight": norm(WIDTH) for name in ("ffn_norm", "post_ffw_norm")}
        found |= {f"blk.{layer}.{name}": values for name, values in own.items()}
    return found


def write_target(path: Path, case: Case = GEMMA) -> Path:
    return tiny_mixtures.write(path, case)


def write_drafter(
    path: Path,
    case: Case = GEMMA,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Floats | None] | None = None,
) -> Path:
    """`metadata` and `tensors` replace what a sound file holds, None leaves an entry out."""
    sizes = {"layers": LAYERS, "width": WIDTH, "hidden": case.inner, "heads": case.heads, "size": case.size}
    writer = begin(path, DRAFTER, context=case.context, kv_heads=case.kv_heads, epsilon=case.epsilon, **sizes)
    writer.add_rope_freq_base(case.base)
    add_windows(writer, DRAFTER, case, LAYERS)
    writer.add_uint32(f"{DRAFTER}.embedding_length_out", case.width)
    writer.add_uint32(f"{DRAFTER}.nextn_predict_layers", LAYERS)
    write_vocabulary(writer, Shape(merges=case.merges))
    return finish(writer, path, {**drafter_tensors(case), **(tensors or {})}, metadata)


class Twin(tiny_mixtures.Twin):
    """Both models over one text."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._drafter = {name: values.astype(np.float64) for name, values in drafter_tensors(case).items()}

    def read(self, token_ids: list[int]) -> tuple[Floats, Floats]:
        """(logits, hidden states) of a text; its keys and values are kept for the drafter."""
        return self.logits(token_ids).astype(np.float32), self.states(token_ids).astype(np.float32)

    def draft(self, token_id: int, state: Floats, position: int) -> tuple[Floats, Floats]:
        """(logits, the next state) of one step; `position` is that of the last token of the text."""
        case, weights = self.case, self._drafter
        embedded = self._all["token_embd.weight"][[token_id]] * math.sqrt(case.width)
        joined: Doubles = np.concatenate((embedded, state[None].astype(np.float64)), axis=1)
        x: Doubles = joined @ weights["nextn.pre_projection.weight"].T
        for layer in range(LAYERS):
            read = case.layers - (2 if case.is_windowed(layer) else 1)
            x = self.layer(layer, weights, x, read, first=position)
        x = self._norm(x, weights["output_norm.weight"])
        logits, after = x @ weights["token_embd.weight"].T, x @ weights["nextn.post_projection.weight"].T
        return logits[0].astype(np.float32), after[0].astype(np.float32)

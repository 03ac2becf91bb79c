"""Tiny random models of the dense architectures and Granite MoE as GGUF files, by the tables of the reader."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.formats.architectures import Sizes
from edgespec.formats.gguf.tables import KINDS
from tiny_gguf import Shape, begin, finish, vocabulary, write_vocabulary

Floats = NDArray[np.float32]
TOKENS, CONTEXT, LONG = len(vocabulary(40)[0]), 512, 384


@dataclass(frozen=True)
class Case:
    """`metadata`: of the file, without the architecture's name in front; `biases`: of the optional tensors, those that
    it has; `factors`: of rotary frequencies, by tensor.
    """

    kind: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 3
    width: int = 64
    inner: int = 96
    experts: int = 0
    biases: tuple[str, ...] = ()
    is_tied: bool = True
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        inner = self.inner if self.experts else 0
        return Sizes(
            *(self.layers, self.width, self.inner, 4, 2, self.width // 4, TOKENS, CONTEXT, self.experts, inner)
        )

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(GGUF name, extents) of all tensors."""
        table, sizes = KINDS[self.kind], self.sizes
        for name, row in table.outer.items():
            if not (self.is_tied and name == "lm_head.weight"):
                yield row.name, sizes.shape(row.shape)
        for layer in range(self.layers):
            for name, row in table.layer.items():
                if not row.is_optional or name in self.biases:
                    yield f"blk.{layer}.{row.name}", sizes.shape(row.shape)


def windows(layers: int) -> dict[str, Any]:
    """In all but each fourth layer."""
    pattern = [(layer + 1) % 4 != 0 for layer in range(layers)]
    return {"attention.sliding_window": 6, "attention.sliding_window_pattern": pattern}


SCALES = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}
GRANITE = {**SCALES, "attention.scale": 0.09}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64}
LONG_ROPE = {
    "rope.dimension_count": 24,
    "rope.scaling.original_context_length": LONG,
    "rope.scaling.attn_factor": math.sqrt(1 + math.log(CONTEXT / LONG) / math.log(LONG)),
}
LONG_FACTORS = {
    "rope_factors_short.weight": tuple(1 + n / 16 for n in range(12)),
    "rope_factors_long.weight": tuple(1 + n / 2 for n in range(12)),
}
CAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0}
TEMPERATURE = {"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0}
QKV = tuple(f"self_attn.{kind}_proj.bias" for kind in "qkv")
CASES = {
    "granite": Case("granite", GRANITE),
    "granitemoe": Case("granitemoe", {**GRANITE, "expert_count": 6, "expert_used_count": 2}, experts=6),
    "minicpm": Case("minicpm", SCALES, is_tied=False),
    "olmo2": Case("olmo2", is_tied=False),
    "olmo3": Case(
        *("olmo2", {**YARN, "rope.scaling.yarn_attn_factor": 1.2079442, **windows(4)}), layers=4, is_tied=False
    ),
    "phi3": Case("phi3", {"rope.dimension_count": 16}, is_tied=False),
    "phi4": Case("phi3", LONG_ROPE, width=128, factors=LONG_FACTORS),
    "gemma2": Case("gemma2", {"attention.sliding_window": 6, **CAPS}),
    "mistral3": Case("mistral3", {**YARN, **TEMPERATURE}, is_tied=False),
    "qwen3-yarn": Case("qwen3", YARN),
    "ernie4_5": Case("ernie4_5"),
    "internlm2": Case("internlm2", is_tied=False),
    "seed_oss": Case("seed_oss", is_tied=False),
    "exaone": Case("exaone", {"rope.dimension_count": 16}),
    "exaone4": Case("exaone4"),
    "exaone4-32b": Case("exaone4", windows(64), layers=64, inner=32, is_tied=False),  # fewer have none in llama.cpp
    "glm4": Case("glm4", {"rope.dimension_count": 16}, width=128, biases=QKV, is_tied=False),
}


def tensors(case: Case) -> dict[str, Floats]:
    """All by their GGUF names, matrices as [outputs, inputs]."""
    rng = np.random.default_rng(len(case.kind))
    found: dict[str, Floats] = {}
    for name, shape in case.shapes():
        noise = rng.standard_normal(shape)
        if noise.ndim == 1:
            values = noise / 5 + (0 if name.endswith("bias") else 1)
            values = values * 0.3 if name.endswith("post_ffw_norm.weight") else values
        else:
            values = noise * (3 if name == "token_embd.weight" else 1.2) / math.sqrt(noise.shape[-1])
        found[name] = values.astype(np.float32)
    return found | {name: np.array(each, np.float32) for name, each in case.factors.items()}


def write(path: Path, case: Case, weights: str = "F32", metadata: Mapping[str, Any] | None = None) -> Path:
    """`weights`: the type of the matrices; `metadata` replaces entries."""
    sizes = {"context": CONTEXT, "width": case.width, "layers": case.layers, "hidden": case.inner}
    writer = begin(path, case.kind, **sizes, heads=4, kv_heads=2)
    writer.add_rope_freq_base(10000.0)
    write_vocabulary(writer, Shape(merges=40))
    given = {f"{case.kind}.{key}": _unsigned(value) for key, value in {**case.metadata, **(metadata or {})}.items()}
    return finish(writer, path, tensors(case), given, gguf.GGMLQuantizationType[weights])


def _unsigned(value: Any) -> Any:
    return np.uint32(value) if type(value) is int else value

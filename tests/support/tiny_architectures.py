"""Tiny random models of the dense architectures that run on our kernels only, as llama.cpp's files have them.

Their tensors are those of the reader's tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.formats.architectures import Sizes, Tensor
from edgespec.formats.gguf.tables import KINDS
from tiny_gguf import Shape, begin, finish, vocabulary, write_vocabulary

Floats = NDArray[np.float32]
TOKENS, EPSILON, BASE, LONG = len(vocabulary(40)[0]), 1e-5, 10000.0, 384


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
    context: int = 512
    experts: int = 0
    biases: tuple[str, ...] = ()
    is_tied: bool = True
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        inner = self.inner if self.experts else 0
        return Sizes(
            *(self.layers, self.width, self.inner, 4, 2, self.width // 4, TOKENS, self.context, self.experts, inner)
        )

    def places(self) -> Iterator[tuple[str, str, Tensor]]:
        """(internal name, GGUF name, row of the table) of all tensors."""
        kind = KINDS[self.kind]
        table = kind.table
        for name, row in table.outer.items():
            if not (self.is_tied and name == "lm_head.weight"):
                yield name, row.name, row
        for layer in range(self.layers):
            for name, row in table.layer.items():
                if not row.is_optional or name in self.biases:
                    yield f"model.layers.{layer}.{name}", f"blk.{layer}.{row.name}", row


def yarn(factor: float, trained: int, **others: float) -> dict[str, Any]:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": trained,
        **others,
    }


def scales(embedding: float, residual: float, logit: float) -> dict[str, float]:
    return {"embedding_scale": embedding, "residual_scale": residual, "logit_scale": logit}


def windows(layers: int, every: int) -> list[bool]:
    return [(layer + 1) % every != 0 for layer in range(layers)]


LONG_FACTORS = {
    "rope_factors_short.weight": tuple(1 + n / 16 for n in range(12)),
    "rope_factors_long.weight": tuple(1 + n / 2 for n in range(12)),
}
QKV = tuple(f"self_attn.{kind}_proj.bias" for kind in "qkv")
CASES = {
    "granite": Case("granite", {**scales(12.0, 0.22, 8.0), "attention.scale": 0.09}),
    "granitemoe": Case(
        "granitemoe",
        {**scales(12.0, 0.22, 8.0), "attention.scale": 0.09, "expert_count": 6, "expert_used_count": 2},
        experts=6,
    ),
    "minicpm": Case("minicpm", scales(12.0, 0.22, 8.0), is_tied=False),
    "olmo2": Case("olmo2", is_tied=False),
    "olmo3": Case(
        "olmo2",
        {
            **yarn(8.0, 64, **{"rope.scaling.yarn_attn_factor": 1.2079442}),
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": windows(4, 4),
        },
        layers=4,
        is_tied=False,
    ),
    "phi3": Case("phi3", {"rope.dimension_count": 16}, is_tied=False),
    "phi4": Case(
        "phi3",
        {
            "rope.dimension_count": 24,
            "rope.scaling.original_context_length": LONG,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(512 / LONG) / math.log(LONG)),
        },
        width=128,
        factors=LONG_FACTORS,
    ),
    "gemma2": Case(
        "gemma2", {"attention.sliding_window": 6, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0}
    ),
    "mistral3": Case(
        "mistral3",
        yarn(8.0, 64, **{"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0}),
        is_tied=False,
    ),
    "qwen3-yarn": Case("qwen3", yarn(8.0, 64)),
    "ernie4_5": Case("ernie4_5"),
    "internlm2": Case("internlm2", is_tied=False),
    "seed_oss": Case("seed_oss", is_tied=False),
    "exaone": Case("exaone", {"rope.dimension_count": 16}),
    "exaone4": Case("exaone4"),
    "exaone4-32b": Case(
        "exaone4",
        {"attention.sliding_window": 6, "attention.sliding_window_pattern": windows(64, 4)},
        layers=64,  # fewer have no windows in llama.cpp
        inner=32,
        is_tied=False,
    ),
    "glm4": Case("glm4", {"rope.dimension_count": 16}, width=128, biases=QKV, is_tied=False),
}


def tensors(case: Case) -> dict[str, Floats]:
    """All by their GGUF names, matrices as [outputs, inputs]."""
    rng = np.random.default_rng(len(case.kind))
    found: dict[str, Floats] = {}
    for _, name, row in case.places():
        noise = rng.standard_normal(case.sizes.shape(row.shape))
        if noise.ndim == 1:
            values = noise / 5 + (0 if name.endswith("bias") else 1)
            values = values * 0.3 if name.endswith("post_ffw_norm.weight") else values
        else:
            values = noise * (3 if name == "token_embd.weight" else 1.2) / math.sqrt(noise.shape[-1])
        found[name] = values.astype(np.float32)
    return found | {name: np.array(each, np.float32) for name, each in case.factors.items()}


def write(path: Path, case: Case, weights: str = "F32", metadata: Mapping[str, Any] | None = None) -> Path:
    """`weights`: the type of the matrices; `metadata` replaces entries."""
    sizes = {"context": case.context, "width": case.width, "layers": case.layers, "hidden": case.inner}
    writer = begin(path, case.kind, **sizes, heads=4, kv_heads=2, epsilon=EPSILON)
    writer.add_rope_freq_base(BASE)
    write_vocabulary(writer, Shape(merges=40))
    given = {f"{case.kind}.{key}": _unsigned(value) for key, value in {**case.metadata, **(metadata or {})}.items()}
    return finish(writer, path, tensors(case), given, gguf.GGMLQuantizationType[weights])


def _unsigned(value: Any) -> Any:
    return np.uint32(value) if type(value) is int else value

"""Tiny random models of the dense architectures that run on our kernels only, as llama.cpp's files have them.

Their tensors are those of the reader's tables. `hub_model` is the same model in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.formats.architectures import PERMUTE_K, PERMUTE_Q, Sizes, Tensor
from edgespec.formats.gguf.tables import KINDS
from tiny_gguf import Shape, begin, finish, vocabulary, write_vocabulary

Floats = NDArray[np.float32]
TOKENS, EPSILON, BASE, LONG = len(vocabulary(40)[0]), 1e-5, 10000.0, 384


@dataclass(frozen=True)
class Case:
    """`metadata`: of the file, without the architecture's name in front; `hub`: class in transformers, without
    ForCausalLM; `config`: of its configuration, beside the sizes; `biases`: of the optional tensors, those that it has.
    `factors`: of rotary frequencies, by tensor.
    """

    kind: str
    hub: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
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
        table = KINDS[self.kind]
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


def kinds(layers: int, every: int) -> list[str]:
    return [("full_attention", "sliding_attention")[each] for each in windows(layers, every)]


GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
ROPE = {"rope_type": "default", "rope_theta": BASE}
YARN = {"rope_type": "yarn", "rope_theta": BASE, "factor": 8.0, "original_max_position_embeddings": 64}
LONG_FACTORS = {
    "rope_factors_short.weight": tuple(1 + n / 16 for n in range(12)),
    "rope_factors_long.weight": tuple(1 + n / 2 for n in range(12)),
}
LONGROPE = {
    **{f"{name}_factor": list(LONG_FACTORS[f"rope_factors_{name}.weight"]) for name in ("short", "long")},
    "rope_type": "longrope",
    "rope_theta": BASE,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": LONG,
}
CAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0}
QKV = tuple(f"self_attn.{kind}_proj.bias" for kind in "qkv")
CASES = {
    "granite": Case(
        *("granite", "Granite", {**scales(12.0, 0.22, 8.0), "attention.scale": 0.09}),
        {**GRANITE, "attention_multiplier": 0.09},
    ),
    "granitemoe": Case(
        *("granitemoe", "GraniteMoe"),
        {**scales(12.0, 0.22, 8.0), "attention.scale": 0.09, "expert_count": 6, "expert_used_count": 2},
        {**GRANITE, "attention_multiplier": 0.09, "num_local_experts": 6, "num_experts_per_tok": 2},
        experts=6,
    ),
    "minicpm": Case(
        "minicpm", "Granite", scales(12.0, 0.22, 8.0), {**GRANITE, "attention_multiplier": 0.25}, is_tied=False
    ),
    "olmo2": Case("olmo2", "Olmo2", is_tied=False),
    "olmo3": Case(
        *("olmo2", "Olmo3"),
        {
            **yarn(8.0, 64, **{"rope.scaling.yarn_attn_factor": 1.2079442}),
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": windows(4, 4),
        },
        {
            "sliding_window": 6,
            "layer_types": kinds(4, 4),
            "rope_parameters": {"full_attention": {**YARN, "attention_factor": 1.2079442}, "sliding_attention": ROPE},
        },
        layers=4,
        is_tied=False,
    ),
    "phi3": Case("phi3", "Phi3", {"rope.dimension_count": 16}, {"sliding_window": None}, is_tied=False),
    "phi4": Case(
        *("phi3", "Phi3"),
        {
            "rope.dimension_count": 24,
            "rope.scaling.original_context_length": LONG,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(512 / LONG) / math.log(LONG)),
        },
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": LONG, "sliding_window": None},
        width=128,
        factors=LONG_FACTORS,
    ),
    "gemma2": Case(
        *("gemma2", "Gemma2", {"attention.sliding_window": 6, **CAPS}),
        {"query_pre_attn_scalar": 16, **CAPS, "sliding_window": 6, "layer_types": kinds(3, 2), "head_dim": 16},
    ),
    "mistral3": Case(
        *("mistral3", "Ministral3"),
        yarn(8.0, 64, **{"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0}),
        {
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            "head_dim": 16,
            "sliding_window": None,
        },
        is_tied=False,
    ),
    "qwen3-yarn": Case(
        "qwen3", "Qwen3", yarn(8.0, 64), {"rope_parameters": {**YARN, "truncate": True}, "head_dim": 16}
    ),
    "ernie4_5": Case("ernie4_5", "Ernie4_5", config={"head_dim": 16}),
    "internlm2": Case("internlm2", "Llama", is_tied=False),
    "seed_oss": Case(
        *("seed_oss", "SeedOss"),
        config={"attention_bias": True, "attention_out_bias": False, "head_dim": 16},
        is_tied=False,
    ),
    "exaone": Case("exaone", "Llama", {"rope.dimension_count": 16}),
    "exaone4": Case("exaone4", "Exaone4", config={"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4-32b": Case(
        *("exaone4", "Exaone4"),
        {"attention.sliding_window": 6, "attention.sliding_window_pattern": windows(64, 4)},
        {"sliding_window": 6, "sliding_window_pattern": 4, "layer_types": kinds(64, 4)},
        layers=64,  # fewer have no windows in llama.cpp
        inner=32,
        is_tied=False,
    ),
    "glm4": Case(
        *("glm4", "Glm4", {"rope.dimension_count": 16}),
        {"attention_bias": True, "head_dim": 32, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        width=128,
        biases=QKV,
        is_tied=False,
    ),
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


# Of Granite's experts, and of GLM, whose norms have other names at Hugging Face.
RENAMED = {
    "granitemoe": {
        "mlp.router": "block_sparse_moe.router",
        "mlp.experts.down.weight": "block_sparse_moe.experts.down_proj",
    },
    "glm4": {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
}
SIDE_BY_SIDE = ("glm4", "ernie4_5")  # their rotary pairs, at Hugging Face, too


def hub_state(case: Case) -> Iterator[tuple[str, Floats]]:
    """The weights by the names that transformers has for them."""
    found = tensors(case)
    for name, own, row in case.places():
        values = found[own]
        if row.change in (PERMUTE_Q, PERMUTE_K) and case.kind not in SIDE_BY_SIDE:
            heads = 4 if row.change == PERMUTE_Q else 2
            values = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if case.kind == "gemma2" and values.ndim == 1:
            values = values - 1
        old, new = next(((a, b) for a, b in RENAMED.get(case.kind, {}).items() if a in name), ("", ""))
        if name.endswith("experts.gate.weight"):
            both = values, found[own.replace("gate", "up")]
            yield (
                name.replace("mlp.experts.gate.weight", "block_sparse_moe.experts.gate_up_proj"),
                np.concatenate(both, 1),
            )
        elif not name.endswith("experts.up.weight"):
            yield name.replace(old, new), values


def hub_model(case: Case) -> Any:
    """The model of transformers, in double precision."""
    import torch
    import transformers

    config = getattr(transformers, f"{case.hub}Config")(
        **{
            "vocab_size": TOKENS,
            "hidden_size": case.width,
            "intermediate_size": case.inner,
            "num_hidden_layers": case.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": case.context,
            "rms_norm_eps": EPSILON,
            "rope_parameters": ROPE,
            "tie_word_embeddings": case.is_tied,
            "pad_token_id": None,
            "attn_implementation": "eager",
            "experts_implementation": "eager",
            **case.config,
        }
    )
    model = getattr(transformers, f"{case.hub}ForCausalLM")(config).double().eval()
    state = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in hub_state(case)}
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    return model


def with_halves(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention over keys and values in half precision, as our cache keeps them."""

    def found(module: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        return attend(module, query, key.half().to(key.dtype), value.half().to(value.dtype), *rest, **named)

    return found

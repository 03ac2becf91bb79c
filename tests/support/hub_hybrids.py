"""Tiny random hybrids of transformers, and the same weights as llama.cpp's files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from hybrid_gguf import CONV_KERNEL, GRANITE_SCALES, HybridShape, write_granite, write_lfm2, write_qwen35
from tiny_gguf import vocabulary

Floats = NDArray[np.float32]
EPSILON, THETA = 1e-5, 10000.0
BOTH = {
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    **{f"self_attn.{kind}_proj": f"attn_{kind}" for kind in "qkv"},
    **{f"self_attn.{kind}": f"attn_{kind[0]}_norm" for kind in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")},
    **{f"self_attn.{kind}": "attn_output" for kind in ("o_proj", "out_proj")},
    **{f"mlp.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    **{f"feed_forward.{own}": f"ffn_{kind}" for own, kind in (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.down_proj": "ffn_down_exps",
    **{f"conv.{kind}": f"shortconv.{kind}" for kind in ("conv", "in_proj", "out_proj")},
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "shared_mlp.output_linear": "ffn_down",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
}
HALVES = {  # gate and up in one
    "feed_forward.experts.gate_up_proj": ("_exps", 1),
    "block_sparse_moe.experts.gate_up_proj": ("_exps", 1),
    "shared_mlp.input_linear": ("", 0),
}
OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "embedding_norm": "token_embd_norm"}


def make_hybrid(kind: str, path: Path, shape: HybridShape) -> Any:
    """The random model of transformers, in eval mode, after writing it to `path`."""
    torch.manual_seed(shape.seed)
    makes: dict[str, tuple[Any, Any]] = {"lfm2": (_lfm2, write_lfm2), "granite": (_granite, write_granite)}
    make, write = next((both for name, both in makes.items() if kind.startswith(name)), (_qwen35, write_qwen35))
    made = make(shape).eval()
    with torch.no_grad():
        for name, weights in _learnt(made):
            if "expert_bias" in name:
                weights.add_(torch.randn_like(weights))
            elif "norm" in name:
                weights.add_(0.2 * torch.randn_like(weights))
            elif weights.ndim > 1:
                weights.copy_(torch.randn_like(weights) * 1.5 / weights.shape[-1] ** 0.5)
    tensors = dict(_converted(made, kind, shape))
    write(path, shape, tensors=tensors)
    return made


def _qwen35(shape: HybridShape) -> Any:
    count, used, inner = shape.experts
    settings: dict[str, Any] = {"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": inner}
    settings |= {"shared_expert_intermediate_size": shape.hidden, "experts_implementation": "eager"}
    config = (transformers.Qwen3_5MoeTextConfig if count else transformers.Qwen3_5TextConfig)(
        **(settings if count else {}),
        **_common(shape),
        rms_norm_eps=EPSILON,
        head_dim=shape.head_size,
        linear_conv_kernel_dim=CONV_KERNEL,
        linear_key_head_dim=shape.state_size,
        linear_value_head_dim=shape.state_size,
        linear_num_key_heads=shape.key_heads,
        linear_num_value_heads=shape.state_heads,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": THETA,
            "partial_rotary_factor": shape.rotated / shape.head_size,
            "mrope_section": [shape.rotated // 4, shape.rotated // 8, shape.rotated // 8],
        },
    )
    return (transformers.Qwen3_5MoeForCausalLM if count else transformers.Qwen3_5ForCausalLM)(config)


def _lfm2(shape: HybridShape) -> Any:
    count, used, inner = shape.experts
    settings: dict[str, Any] = {"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": inner}
    settings |= {"num_dense_layers": 1, "experts_implementation": "eager"}
    config = (transformers.Lfm2MoeConfig if count else transformers.Lfm2Config)(
        **(settings if count else {"block_auto_adjust_ff_dim": False}),
        **_common(shape),
        norm_eps=EPSILON,
        conv_L_cache=CONV_KERNEL - 1,
        layer_types=["conv" if shape.is_recurrent(n) else "full_attention" for n in range(shape.layers)],
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    return (transformers.Lfm2MoeForCausalLM if count else transformers.Lfm2ForCausalLM)(config)


def _granite(shape: HybridShape) -> Any:
    count, used, inner = shape.experts
    embedding, residual, logits, attention = GRANITE_SCALES.values()
    config = transformers.GraniteMoeHybridConfig(
        **{**_common(shape), "intermediate_size": inner},
        rms_norm_eps=EPSILON,
        num_local_experts=count,
        num_experts_per_tok=used,
        shared_intermediate_size=shape.hidden,
        embedding_multiplier=embedding,
        residual_multiplier=residual,
        logits_scaling=logits,
        attention_multiplier=attention,
        layer_types=["linear_attention" if shape.is_recurrent(n) else "full_attention" for n in range(shape.layers)],
        mamba_n_heads=shape.state_heads,
        mamba_d_state=shape.state_size,
        mamba_d_head=shape.value_size,
        mamba_d_conv=CONV_KERNEL,
        experts_implementation="eager",
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def _common(shape: HybridShape) -> dict[str, Any]:
    return {
        "vocab_size": len(vocabulary(shape.merges)[0]),
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
    }


def _learnt(made: Any) -> Any:
    """(name, tensor) of what training makes: parameters, and the experts' biases, which are buffers."""
    return *made.named_parameters(), *((name, each) for name, each in made.named_buffers() if "expert_bias" in name)


def _converted(made: Any, kind: str, shape: HybridShape) -> Any:
    """(name, values) of each tensor, as llama.cpp's converter writes them."""
    is_plain = not kind.startswith("qwen35")  # its norms multiply by their weights
    shared = "_shexp" if shape.experts[0] else ""
    for name, weights in _learnt(made):
        values = weights.detach().numpy().astype(np.float32)
        parts = name.removeprefix("model.").split(".")
        if parts[0] != "layers":
            yield f"{OUTER[parts[0]]}.weight", values + (not is_plain and "norm" in parts[0])
            continue
        rest = ".".join(parts[2:]).removesuffix(".weight")
        if rest in HALVES:
            end, axis = HALVES[rest]
            for own, half in zip(("gate", "up"), np.split(values, 2, axis=axis), strict=True):
                yield f"blk.{parts[1]}.ffn_{own}{end or shared}.weight", np.ascontiguousarray(half)
            continue
        if rest == "mamba.conv1d.bias":
            yield f"blk.{parts[1]}.ssm_conv1d.bias", values
            continue
        own = BOTH[rest] + ("" if rest.endswith(("dt_bias", "A_log", "mamba.D", "expert_bias")) else ".weight")
        if rest == "post_attention_layernorm" and is_plain:
            own = "ffn_norm.weight"
        if rest == "shared_mlp.output_linear":
            own = f"ffn_down{shared}.weight"
        if not is_plain and "norm" in rest and "linear" not in rest:
            values = values + np.float32(1)  # these norms multiply by 1 + weight
        if rest.endswith("A_log"):
            values = -np.exp(values)
        if rest.startswith("linear_attn") and "norm" not in rest:
            values = _spread(values, rest, shape)
        values = values[:, 0] if values.shape[1:2] == (1,) else values
        values = values[0] if len(values) == 1 else values
        if rest in ("mamba.A_log", "mamba.D", "mamba.norm"):  # of which files make matrices
            values = values[None] if rest == "mamba.norm" else values[:, None]
        yield f"blk.{parts[1]}.{own}", values


def _spread(values: Floats, rest: str, shape: HybridShape) -> Floats:
    """The heads of values in the order of files: the first of each key's head, then the second of each."""
    count, keys = shape.state_heads // shape.key_heads, 2 * shape.key_heads * shape.state_size
    size = 1 if rest.endswith(("in_proj_a", "in_proj_b", "dt_bias", "A_log")) else shape.state_size

    def spread(rows: Floats) -> Floats:
        heads = rows.reshape(shape.key_heads, count, size, *rows.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(rows.shape)

    if rest.endswith(("qkv", "conv1d")):
        return np.concatenate([values[:keys], spread(values[keys:])])
    return np.ascontiguousarray(spread(values.T).T) if rest.endswith("out_proj") else spread(values)

"""The architectures that our kernels run (`KINDS`), and the tensors that no table of an export has.

Experts' matrices have one for each expert, one below the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgespec.formats.architectures import (
    ARCHITECTURES,
    ATTENTION,
    HEAD_NORMS,
    LLAMA_ATTENTION,
    LLAMA_LAYER,
    LLAMA_OUTER,
    MLP,
    PERMUTE_K,
    PERMUTE_Q,
    QKV_BIASES,
    TWO_NORMS,
    Tensor,
)

Table = Mapping[str, Tensor]
EXPERTS = {
    "mlp.router.weight": Tensor("ffn_gate_inp.weight", "e d"),
    "mlp.experts.gate.weight": Tensor("ffn_gate_exps.weight", "e x d"),
    "mlp.experts.up.weight": Tensor("ffn_up_exps.weight", "e x d"),
    "mlp.experts.down.weight": Tensor("ffn_down_exps.weight", "e d x"),
}
PREFERENCE = {"mlp.router.preference": Tensor("exp_probs_b.bias", "e")}
EXPERT_BIASES = {
    "mlp.router.bias": Tensor("ffn_gate_inp.bias", "e"),
    "mlp.experts.gate.bias": Tensor("ffn_gate_exps.bias", "e x"),
    "mlp.experts.up.bias": Tensor("ffn_up_exps.bias", "e x"),
    "mlp.experts.down.bias": Tensor("ffn_down_exps.bias", "e d"),
}
SHARED_EXPERT = {
    "mlp.shared_gate.weight": Tensor("ffn_gate_inp_shexp.weight", "d"),
    "mlp.gate_proj.weight": Tensor("ffn_gate_shexp.weight", "f d"),
    "mlp.up_proj.weight": Tensor("ffn_up_shexp.weight", "f d"),
    "mlp.down_proj.weight": Tensor("ffn_down_shexp.weight", "d f"),
}
NORMS_BEHIND = {
    "post_attention_layernorm.weight": Tensor("post_attention_norm.weight", "d"),
    "post_feedforward_layernorm.weight": Tensor("post_ffw_norm.weight", "d"),
}
FOUR_NORMS = {
    "input_layernorm.weight": Tensor("attn_norm.weight", "d"),
    "pre_feedforward_layernorm.weight": Tensor("ffn_norm.weight", "d"),
    **NORMS_BEHIND,
}
WIDE_NORMS = {
    "self_attn.q_norm.weight": Tensor("attn_q_norm.weight", "q"),
    "self_attn.k_norm.weight": Tensor("attn_k_norm.weight", "k"),
}
FUSED_MLP = {
    "mlp.gate_up_proj.weight": Tensor("ffn_up.weight", "2f d"),
    "mlp.down_proj.weight": Tensor("ffn_down.weight", "d f"),
}
PHI3_LAYER = {
    **TWO_NORMS,
    "self_attn.qkv_proj.weight": Tensor("attn_qkv.weight", "q+2k d"),
    "self_attn.o_proj.weight": Tensor("attn_output.weight", "d q"),
    **FUSED_MLP,
}
NORM_BEHIND_ATTENTION = {"post_attention_layernorm.weight": Tensor("post_attention_norm.weight", "d")}
GPT_OSS_LAYER = {
    **TWO_NORMS,
    **ATTENTION,
    **QKV_BIASES,
    **EXPERTS,
    **EXPERT_BIASES,
    "self_attn.o_proj.bias": Tensor("attn_output.bias", "d"),
    "self_attn.sinks": Tensor("attn_sinks.weight", "a"),
    **NORM_BEHIND_ATTENTION,
}

GEMMA4_KEYS = (
    *("attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers"),
    *("embedding_length_per_layer_input", "rope.dimension_count_swa"),
)
GEMMA4_LAYER = {
    **FOUR_NORMS,
    **ATTENTION,
    **HEAD_NORMS,
    **MLP,
    # Layers that read other layers' keys and values may hold their own all the same; full ones may have no values.
    "self_attn.k_proj.weight": Tensor("attn_k.weight", "k d", is_optional=True),
    "self_attn.v_proj.weight": Tensor("attn_v.weight", "k d", is_optional=True),
    "self_attn.k_norm.weight": Tensor("attn_k_norm.weight", "h", is_optional=True),
}
# What a Gemma 4 has or has not: a second embedding in each layer, routed experts, factors of the layers' results.
SECOND_EMBEDDING = {
    "model.embed_tokens_per_layer.weight": Tensor("per_layer_token_embd.weight", "v P"),
    "model.per_layer_model_projection.weight": Tensor("per_layer_model_proj.weight", "P d"),
    "model.per_layer_projection_norm.weight": Tensor("per_layer_proj_norm.weight", "p"),
}
SECOND_EMBEDDING_LAYER = {
    "per_layer_input_gate.weight": Tensor("inp_gate.weight", "p d"),
    "per_layer_projection.weight": Tensor("proj.weight", "d p"),
    "post_per_layer_input_layernorm.weight": Tensor("post_norm.weight", "d"),
}
ROUTED_LAYER = {
    "mlp.router.weight": Tensor("ffn_gate_inp.weight", "e d"),
    "mlp.router.scale": Tensor("ffn_gate_inp.scale", "d"),
    "pre_feedforward_layernorm_2.weight": Tensor("pre_ffw_norm_2.weight", "d"),
    "post_feedforward_layernorm_1.weight": Tensor("post_ffw_norm_1.weight", "d"),
    "post_feedforward_layernorm_2.weight": Tensor("post_ffw_norm_2.weight", "d"),
    "mlp.experts.gate.weight": Tensor("ffn_gate_up_exps.weight", "e 2x d"),
    "mlp.experts.down.weight": Tensor("ffn_down_exps.weight", "e d x"),
    "mlp.experts.scale": Tensor("ffn_down_exps.scale", "e"),
}
SCALED_LAYER = {"layer_scalar": Tensor("layer_output_scale.weight", "1")}
# Its drafter reads embeddings and states of its target, which are P wide here.
GEMMA4_DRAFTER_OUTER = {
    **LLAMA_OUTER,
    "model.pre_projection.weight": Tensor("nextn.pre_projection.weight", "d 2P"),
    "model.post_projection.weight": Tensor("nextn.post_projection.weight", "P d"),
}

# Heads that read states of a target's layers, t wide together, and know n tokens. What they lack is the target's.
HEAD_OUTER = {
    **LLAMA_OUTER,
    "model.embed_tokens.weight": Tensor("token_embd.weight", "v d", is_optional=True),
    "lm_head.weight": Tensor("output.weight", "n d", is_optional=True),
    "model.drafted": Tensor("d2t", "n", is_optional=True),
    "model.fc.weight": Tensor("fc.weight", "d t"),
}
EAGLE3_LAYER = {
    "embedding_norm.weight": Tensor("attn_norm.weight", "d"),
    "state_norm.weight": Tensor("attn_norm_2.weight", "d"),
    "self_attn.q_proj.weight": Tensor("attn_q.weight", "q 2d", PERMUTE_Q),
    "self_attn.k_proj.weight": Tensor("attn_k.weight", "k 2d", PERMUTE_K),
    "self_attn.v_proj.weight": Tensor("attn_v.weight", "k 2d"),
    "self_attn.o_proj.weight": Tensor("attn_output.weight", "d q"),
    "post_attention_layernorm.weight": Tensor("ffn_norm.weight", "d"),
    **MLP,
}
DFLASH_OUTER = {
    **HEAD_OUTER,
    "model.state_norm.weight": Tensor("enc.output_norm.weight", "d"),
    "model.markov.weight": Tensor("markov_w1.weight", "v r", is_optional=True),
    "model.followers.weight": Tensor("markov_w2.weight", "n r", is_optional=True),
    "model.confidence.weight": Tensor("conf_proj.weight", "1 d+r", is_optional=True),
    "model.confidence.bias": Tensor("conf_proj.bias", "1", is_optional=True),
}
SINKS = {"self_attn.sinks": Tensor("attn_sinks.weight", "a", is_optional=True)}
DFLASH_LAYER = {**TWO_NORMS, **ATTENTION, **HEAD_NORMS, **SINKS, **MLP}
DFLASH2_OUTER = {
    **DFLASH_OUTER,
    "model.markov.weight": Tensor("selector_predecessor.weight", "v r"),
    "model.followers.weight": Tensor("selector_successor.weight", "v r"),
    "model.selector.weight": Tensor("selector_hidden.weight", "r d"),
}
DFLASH2_LAYER = {
    **DFLASH_LAYER,
    "attn_conv.base": Tensor("attn_conv_base", "2 taps d"),
    "attn_conv.weight": Tensor("attn_conv_proj.weight", "kernels d"),
    "mlp_conv.base": Tensor("ffn_conv_base", "2 taps d"),
    "mlp_conv.weight": Tensor("ffn_conv_proj.weight", "kernels d"),
}

LFM2_OUTER = {**LLAMA_OUTER, "model.norm.weight": Tensor("token_embd_norm.weight", "d")}

SHARED_INNER = "expert_shared_feed_forward_length"
EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
STATE_KEYS = tuple(f"ssm.{key}" for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count"))
QWEN35_KEYS = (
    *(*STATE_KEYS, "full_attention_interval", "attention.recurrent_layers", "rope.dimension_sections"),
    "nextn_predict_layers",
)
SCALES = ("embedding_scale", "residual_scale", "logit_scale")
WINDOW, WINDOW_BASE, SCORE_CAP = "attention.sliding_window", "rope.freq_base_swa", "attn_logit_softcapping"
TEMPERATURE = "attention.temperature_scale"


@dataclass(frozen=True, slots=True)
class Kind:
    """How llama.cpp computes one architecture.

    `outer` and `layer`: its tensors; those of hybrids' layers, which are of two kinds, are in `hybrid`. `settings`: of
    its `LlamaConfig`, `experts`: of its `Experts`, beside sizes and numbers in the file; `keys`: of its metadata that
    others do not have; `unrotated_every`: each n-th layer has no rotary positions; `window_every`: all but each n-th
    layer have a window; `window_base`: these rotate by it (0: the model's) where the file does not say, undivided;
    None: as the others; `largest`: layers of the model whose attention is scaled by width / heads.
    """

    layer: Table
    settings: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    outer: Table = field(default_factory=lambda: LLAMA_OUTER)
    experts: Mapping[str, Any] = field(default_factory=dict)
    is_gemma: bool = False
    largest: int = 0
    unrotated_every: int = 0
    window_every: int = 0
    window_base: float | None = None


HEADS_NORMED: Mapping[str, Any] = {"has_head_norms": True}
GEMMA: Mapping[str, Any] = {"has_post_norms": True, "activation": "gelu"}
GEMMA_WINDOWS: Mapping[str, Any] = {"is_gemma": True, "window_every": 6, "window_base": 10000.0}  # of 3 and 4
NORMED_BEHIND: Mapping[str, Any] = {"has_pre_norms": False, "has_post_norms": True}
GRANITE_KEYS = (*SCALES, "attention.scale", "rope.scaling.finetuned")
KINDS = {
    "llama": Kind(LLAMA_LAYER),
    "qwen2": Kind(ARCHITECTURES["Qwen2ForCausalLM"].layer),
    "qwen3": Kind(ARCHITECTURES["Qwen3ForCausalLM"].layer, HEADS_NORMED),
    "smollm3": Kind(ARCHITECTURES["SmolLM3ForCausalLM"].layer, unrotated_every=4),
    "gemma2": Kind(
        {**FOUR_NORMS, **ATTENTION, **MLP}, GEMMA, (WINDOW, SCORE_CAP), is_gemma=True, largest=46, window_every=2
    ),
    "gemma3": Kind(
        ARCHITECTURES["Gemma3ForCausalLM"].layer, {**GEMMA, **HEADS_NORMED}, (WINDOW_BASE,), largest=62, **GEMMA_WINDOWS
    ),
    "granite": Kind(LLAMA_LAYER, keys=GRANITE_KEYS),
    "granitemoe": Kind({**TWO_NORMS, **LLAMA_ATTENTION, **EXPERTS}, keys=(*GRANITE_KEYS, *EXPERT_KEYS)),
    "minicpm": Kind(LLAMA_LAYER, keys=SCALES),
    "mistral3": Kind(LLAMA_LAYER, keys=(TEMPERATURE, "rope.scaling.yarn_log_multiplier")),
    "ernie4_5": Kind(LLAMA_LAYER),
    "internlm2": Kind(LLAMA_LAYER),
    "seed_oss": Kind({**TWO_NORMS, **ATTENTION, **QKV_BIASES, **MLP, **NORM_BEHIND_ATTENTION}),
    "exaone": Kind({**TWO_NORMS, **ATTENTION, **MLP}),
    "exaone4": Kind(
        {**NORMS_BEHIND, **ATTENTION, **HEAD_NORMS, **MLP},
        {**NORMED_BEHIND, **HEADS_NORMED},
        unrotated_every=4,
        window_every=4,
    ),
    "olmo2": Kind(
        {**NORMS_BEHIND, **ATTENTION, **WIDE_NORMS, **MLP},
        {**NORMED_BEHIND, "has_wide_norms": True},
        keys=(WINDOW_BASE,),
        window_every=4,
        window_base=0.0,
    ),
    "phi3": Kind(PHI3_LAYER, {"fused": {"qkv_proj", "gate_up_proj"}}),
    # Rotary pairs are side by side, at Hugging Face, too.
    "glm4": Kind({**FOUR_NORMS, **FUSED_MLP, **LLAMA_ATTENTION}, {"has_post_norms": True, "fused": {"gate_up_proj"}}),
    "qwen3moe": Kind({**TWO_NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS}, HEADS_NORMED, keys=EXPERT_KEYS),
    "gpt-oss": Kind(
        GPT_OSS_LAYER,
        {"has_sinks": True},
        keys=EXPERT_KEYS,
        experts={"gate": "clamped", "has_biases": True},
        window_every=2,
    ),
    "gemma4": Kind(
        GEMMA4_LAYER,
        {**GEMMA, **HEADS_NORMED},
        keys=(*EXPERT_KEYS, *GEMMA4_KEYS, WINDOW, WINDOW_BASE),
        experts={"gate": "gelu", "is_joined": True},
        **GEMMA_WINDOWS,
    ),
    "gemma4-assistant": Kind(
        {**GEMMA4_LAYER, **SCALED_LAYER},
        {**GEMMA, **HEADS_NORMED},
        outer=GEMMA4_DRAFTER_OUTER,
        keys=(*GEMMA4_KEYS, WINDOW, WINDOW_BASE, "embedding_length_out", "nextn_predict_layers"),
        **GEMMA_WINDOWS,
    ),
    "eagle3": Kind(
        EAGLE3_LAYER, outer=HEAD_OUTER, keys=("target_layers", "target_hidden_size", "norm_before_residual")
    ),
    "dflash": Kind(
        DFLASH_LAYER,
        HEADS_NORMED,
        outer=DFLASH_OUTER,
        keys=(
            *("target_layers", "block_size", "sample_from_anchor", "attention.causal", "rope.dimension_sections"),
            *("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"),
        ),
        window_every=1,
    ),
    "qwen35": Kind({}, HEADS_NORMED, keys=QWEN35_KEYS),
    "qwen35moe": Kind({}, HEADS_NORMED, keys=(*QWEN35_KEYS, *EXPERT_KEYS, SHARED_INNER)),
    "granitehybrid": Kind({}, keys=(*GRANITE_KEYS, *STATE_KEYS, *EXPERT_KEYS, SHARED_INNER)),
    "lfm2": Kind({}, HEADS_NORMED, keys=("shortconv.l_cache",), outer=LFM2_OUTER),
    "lfm2moe": Kind(
        {},
        HEADS_NORMED,
        outer=LFM2_OUTER,
        keys=("shortconv.l_cache", "leading_dense_block_count", "expert_gating_func", *EXPERT_KEYS),
        experts={"has_preference": True},
    ),
}

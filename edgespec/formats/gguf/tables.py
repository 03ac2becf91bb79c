"""The tensors of the architectures that run on our kernels only, as tables of the kind in `formats.architectures`.

Experts' matrices have one for each expert, one below the other.
"""

from __future__ import annotations

from edgespec.formats.architectures import (
    ATTENTION,
    HEAD_NORMS,
    LLAMA_LAYER,
    LLAMA_OUTER,
    MLP,
    QKV_BIASES,
    TWO_NORMS,
    Architecture,
    Tensor,
)

EXPERTS = {
    "mlp.router.weight": Tensor("ffn_gate_inp.weight", "e d"),
    "mlp.experts.gate.weight": Tensor("ffn_gate_exps.weight", "e x d"),
    "mlp.experts.up.weight": Tensor("ffn_up_exps.weight", "e x d"),
    "mlp.experts.down.weight": Tensor("ffn_down_exps.weight", "e d x"),
}
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
OLMO2 = Architecture("olmo2", LLAMA_OUTER, {**NORMS_BEHIND, **ATTENTION, **WIDE_NORMS, **MLP})
EXAONE = Architecture("exaone", LLAMA_OUTER, {**TWO_NORMS, **ATTENTION, **MLP})
EXAONE4 = Architecture("exaone4", LLAMA_OUTER, {**NORMS_BEHIND, **ATTENTION, **HEAD_NORMS, **MLP})
PHI3 = Architecture(
    "phi3",
    LLAMA_OUTER,
    {
        **TWO_NORMS,
        "self_attn.qkv_proj.weight": Tensor("attn_qkv.weight", "q+2k d"),
        "self_attn.o_proj.weight": Tensor("attn_output.weight", "d q"),
        **FUSED_MLP,
    },
)
# Rotary pairs are side by side, at Hugging Face, too.
GLM4 = Architecture(
    "glm4",
    LLAMA_OUTER,
    {
        **FOUR_NORMS,
        **FUSED_MLP,
        **{name: row for name, row in LLAMA_LAYER.items() if name.startswith("self_attn.")},
    },
)
SEED_OSS = Architecture(
    "seed_oss",
    LLAMA_OUTER,
    {
        **TWO_NORMS,
        **ATTENTION,
        **QKV_BIASES,
        **MLP,
        "post_attention_layernorm.weight": Tensor("post_attention_norm.weight", "d"),
    },
)
GRANITE_MOE = Architecture(
    "granitemoe",
    LLAMA_OUTER,
    {**{name: row for name, row in LLAMA_LAYER.items() if not name.startswith("mlp.")}, **EXPERTS},
)
QWEN3_MOE = Architecture("qwen3moe", LLAMA_OUTER, {**TWO_NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS})
GPT_OSS = Architecture(
    "gpt-oss",
    LLAMA_OUTER,
    {
        **TWO_NORMS,
        **ATTENTION,
        **QKV_BIASES,
        **EXPERTS,
        **EXPERT_BIASES,
        "self_attn.o_proj.bias": Tensor("attn_output.bias", "d"),
        "self_attn.sinks": Tensor("attn_sinks.weight", "a"),
        "post_attention_layernorm.weight": Tensor("post_attention_norm.weight", "d"),
    },
)

GEMMA4_KEYS = (
    *("attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers"),
    *("embedding_length_per_layer_input", "rope.dimension_count_swa", "rope.freq_base_swa"),
)
GEMMA4_OUTER = {
    **LLAMA_OUTER,
    "model.embed_tokens_per_layer.weight": Tensor("per_layer_token_embd.weight", "v P", is_optional=True),
    "model.per_layer_model_projection.weight": Tensor("per_layer_model_proj.weight", "P d", is_optional=True),
    "model.per_layer_projection_norm.weight": Tensor("per_layer_proj_norm.weight", "p", is_optional=True),
}
GEMMA4_LAYER = {
    **FOUR_NORMS,
    **ATTENTION,
    **HEAD_NORMS,
    **MLP,
    # Layers that read other layers' keys and values may hold their own all the same; full ones may have no values.
    "self_attn.k_proj.weight": Tensor("attn_k.weight", "k d", is_optional=True),
    "self_attn.v_proj.weight": Tensor("attn_v.weight", "k d", is_optional=True),
    "self_attn.k_norm.weight": Tensor("attn_k_norm.weight", "h", is_optional=True),
    "layer_scalar": Tensor("layer_output_scale.weight", "1", is_optional=True),
    "per_layer_input_gate.weight": Tensor("inp_gate.weight", "p d", is_optional=True),
    "per_layer_projection.weight": Tensor("proj.weight", "d p", is_optional=True),
    "post_per_layer_input_layernorm.weight": Tensor("post_norm.weight", "d", is_optional=True),
    "mlp.router.weight": Tensor("ffn_gate_inp.weight", "e d", is_optional=True),
    "mlp.router.scale": Tensor("ffn_gate_inp.scale", "d", is_optional=True),
    "pre_feedforward_layernorm_2.weight": Tensor("pre_ffw_norm_2.weight", "d", is_optional=True),
    "post_feedforward_layernorm_1.weight": Tensor("post_ffw_norm_1.weight", "d", is_optional=True),
    "post_feedforward_layernorm_2.weight": Tensor("post_ffw_norm_2.weight", "d", is_optional=True),
    "mlp.experts.gate.weight": Tensor("ffn_gate_up_exps.weight", "e 2x d", is_optional=True),
    "mlp.experts.down.weight": Tensor("ffn_down_exps.weight", "e d x", is_optional=True),
    "mlp.experts.scale": Tensor("ffn_down_exps.scale", "e", is_optional=True),
}
GEMMA4 = Architecture("gemma4", GEMMA4_OUTER, GEMMA4_LAYER)
# Its drafter reads embeddings and states of its target, which are P wide here.
GEMMA4_DRAFTER_OUTER = {
    **LLAMA_OUTER,
    "model.pre_projection.weight": Tensor("nextn.pre_projection.weight", "d 2P"),
    "model.post_projection.weight": Tensor("nextn.post_projection.weight", "P d"),
}
GEMMA4_DRAFTER = Architecture("gemma4-assistant", GEMMA4_DRAFTER_OUTER, GEMMA4_LAYER)

# Hybrids have layers of two kinds, whose tensors are in `hybrid`.
QWEN35 = Architecture("qwen35", LLAMA_OUTER, {})
QWEN35_MOE = Architecture("qwen35moe", LLAMA_OUTER, {})
LFM2 = Architecture("lfm2", {**LLAMA_OUTER, "model.norm.weight": Tensor("token_embd_norm.weight", "d")}, {})

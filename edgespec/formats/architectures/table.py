"""The supported architectures as tables: tensors with shapes, required settings, metadata.

Settings that llama.cpp does not support are rejected by name before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.formats.architectures.layers import check_unrotated_layers, rotary_settings
from edgespec.formats.architectures.rows import (
    ADD_ONE,
    PERMUTE_K,
    PERMUTE_Q,
    SCALE_Q,
    SCALE_Q_NORM,
    TRANSPOSE,
    Architecture,
    Tensor,
    read_gpt2_sizes,
)
from edgespec.formats.checkpoint import Checkpoint, unsupported

HEAD = {"lm_head.weight": Tensor("output.weight", "v d", is_optional=True)}
LLAMA_OUTER = {
    "model.embed_tokens.weight": Tensor("token_embd.weight", "v d"),
    "model.norm.weight": Tensor("output_norm.weight", "d"),
    **HEAD,
}
MLP = {
    "mlp.gate_proj.weight": Tensor("ffn_gate.weight", "f d"),
    "mlp.up_proj.weight": Tensor("ffn_up.weight", "f d"),
    "mlp.down_proj.weight": Tensor("ffn_down.weight", "d f"),
}
ATTENTION = {
    "self_attn.q_proj.weight": Tensor("attn_q.weight", "q d"),
    "self_attn.k_proj.weight": Tensor("attn_k.weight", "k d"),
    "self_attn.v_proj.weight": Tensor("attn_v.weight", "k d"),
    "self_attn.o_proj.weight": Tensor("attn_output.weight", "d q"),
}
TWO_NORMS = {
    "input_layernorm.weight": Tensor("attn_norm.weight", "d"),
    "post_attention_layernorm.weight": Tensor("ffn_norm.weight", "d"),
}
QKV_BIASES = {
    "self_attn.q_proj.bias": Tensor("attn_q.bias", "q"),
    "self_attn.k_proj.bias": Tensor("attn_k.bias", "k"),
    "self_attn.v_proj.bias": Tensor("attn_v.bias", "k"),
}
HEAD_NORMS = {
    "self_attn.q_norm.weight": Tensor("attn_q_norm.weight", "h"),
    "self_attn.k_norm.weight": Tensor("attn_k_norm.weight", "h"),
}
# Hugging Face stores a head's rotary pairs as two halves; llama.cpp's Llama and SmolLM3 need them interleaved.
INTERLEAVED = {
    "self_attn.q_proj.weight": Tensor("attn_q.weight", "q d", PERMUTE_Q),
    "self_attn.k_proj.weight": Tensor("attn_k.weight", "k d", PERMUTE_K),
}
LLAMA_LAYER = {
    **TWO_NORMS,
    **ATTENTION,
    **INTERLEAVED,
    **MLP,
    "self_attn.q_proj.bias": Tensor("attn_q.bias", "q", PERMUTE_Q, is_optional=True),
    "self_attn.k_proj.bias": Tensor("attn_k.bias", "k", PERMUTE_K, is_optional=True),
    "self_attn.v_proj.bias": Tensor("attn_v.bias", "k", is_optional=True),
    "self_attn.o_proj.bias": Tensor("attn_output.bias", "d", is_optional=True),
    "mlp.gate_proj.bias": Tensor("ffn_gate.bias", "f", is_optional=True),
    "mlp.up_proj.bias": Tensor("ffn_up.bias", "f", is_optional=True),
    "mlp.down_proj.bias": Tensor("ffn_down.bias", "d", is_optional=True),
}
SMOLLM3_LAYER = {**TWO_NORMS, **ATTENTION, **INTERLEAVED, **MLP}
# Gemma's norms multiply by 1 + weight.
GEMMA_OUTER = {
    "model.embed_tokens.weight": Tensor("token_embd.weight", "v d"),
    "model.norm.weight": Tensor("output_norm.weight", "d", ADD_ONE),
    **HEAD,
}
GEMMA_LAYER = {
    "input_layernorm.weight": Tensor("attn_norm.weight", "d", ADD_ONE),
    "post_attention_layernorm.weight": Tensor("ffn_norm.weight", "d", ADD_ONE),
    **ATTENTION,
    **MLP,
}
FOUR_NORMS = {
    "input_layernorm.weight": Tensor("attn_norm.weight", "d", ADD_ONE),
    "post_attention_layernorm.weight": Tensor("post_attention_norm.weight", "d", ADD_ONE),
    "pre_feedforward_layernorm.weight": Tensor("ffn_norm.weight", "d", ADD_ONE),
    "post_feedforward_layernorm.weight": Tensor("post_ffw_norm.weight", "d", ADD_ONE),
}
GEMMA2_LAYER = {
    **FOUR_NORMS,
    **ATTENTION,
    **MLP,
    "self_attn.q_proj.weight": Tensor("attn_q.weight", "q d", SCALE_Q),
}
GEMMA3_LAYER = {
    **FOUR_NORMS,
    **ATTENTION,
    **MLP,
    "self_attn.q_norm.weight": Tensor("attn_q_norm.weight", "h", SCALE_Q_NORM),
    "self_attn.k_norm.weight": Tensor("attn_k_norm.weight", "h", ADD_ONE),
}
GPT2_OUTER = {
    "transformer.wte.weight": Tensor("token_embd.weight", "v d"),
    "transformer.wpe.weight": Tensor("position_embd.weight", "c d"),
    "transformer.ln_f.weight": Tensor("output_norm.weight", "d"),
    "transformer.ln_f.bias": Tensor("output_norm.bias", "d"),
    **HEAD,
}
# GPT-2 stores its matrices as [in, out]; shapes here are as stored.
GPT2_LAYER = {
    "ln_1.weight": Tensor("attn_norm.weight", "d"),
    "ln_1.bias": Tensor("attn_norm.bias", "d"),
    "attn.c_attn.weight": Tensor("attn_qkv.weight", "d 3d", TRANSPOSE),
    "attn.c_attn.bias": Tensor("attn_qkv.bias", "3d"),
    "attn.c_proj.weight": Tensor("attn_output.weight", "d d", TRANSPOSE),
    "attn.c_proj.bias": Tensor("attn_output.bias", "d"),
    "ln_2.weight": Tensor("ffn_norm.weight", "d"),
    "ln_2.bias": Tensor("ffn_norm.bias", "d"),
    "mlp.c_fc.weight": Tensor("ffn_up.weight", "d f", TRANSPOSE),
    "mlp.c_fc.bias": Tensor("ffn_up.bias", "f"),
    "mlp.c_proj.weight": Tensor("ffn_down.weight", "f d", TRANSPOSE),
    "mlp.c_proj.bias": Tensor("ffn_down.bias", "d"),
}
SILU = {"hidden_act": ("silu", "swish", None)}
TANH_GELU = {"hidden_activation": ("gelu_pytorch_tanh", None), "use_bidirectional_attention": (False, None)}
GPT2_MUST = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
}
LLAMA = Architecture("llama", LLAMA_OUTER, LLAMA_LAYER, must=SILU, rope_kinds=("default", "linear", "llama3"))
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": Architecture("qwen2", LLAMA_OUTER, {**TWO_NORMS, **ATTENTION, **QKV_BIASES, **MLP}, must=SILU),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        LLAMA_OUTER,
        {**TWO_NORMS, **ATTENTION, **HEAD_NORMS, **MLP},
        must={**SILU, "attention_bias": (False, None)},
    ),
    "SmolLM3ForCausalLM": Architecture("smollm3", LLAMA_OUTER, SMOLLM3_LAYER, must=SILU, ties_by_default=True),
    "GemmaForCausalLM": Architecture("gemma", GEMMA_OUTER, GEMMA_LAYER, must=TANH_GELU, head_is_tied=True),
    "Gemma2ForCausalLM": Architecture(
        "gemma2",
        GEMMA_OUTER,
        GEMMA2_LAYER,
        must=TANH_GELU,
        head_is_tied=True,
        rope_kinds=("default",),
        has_window=True,
        window_pattern=2,
        fixed_attention_scale_layers=46,
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3",
        GEMMA_OUTER,
        GEMMA3_LAYER,
        must={**TANH_GELU, "attn_logit_softcapping": (None,)},
        ties_by_default=True,
        has_window=True,
        window_pattern=6,
        fixed_attention_scale_layers=62,
    ),
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        GPT2_OUTER,
        GPT2_LAYER,
        layer_prefix="transformer.h.",
        optional_prefix="transformer.",
        norm_epsilon="layer_norm_epsilon",
        sizes=read_gpt2_sizes,
        must=GPT2_MUST,
        head_is_tied=True,
    ),
}


def is_tied(architecture: str, settings: Mapping[str, Any]) -> bool:
    """Whether a model's output projection is its embedding matrix. `settings`: of its text model, from config.json."""
    return ARCHITECTURES.get(architecture, LLAMA).is_tied(settings)


def architecture_of(checkpoint: Checkpoint) -> Architecture:
    """The table of a checkpoint's architecture. Raises ModelFileError if it or one of its settings is not supported."""
    kind, config = checkpoint.architecture, checkpoint.config
    if kind not in ARCHITECTURES:
        raise unsupported(checkpoint.folder, kind, "GGUF", ARCHITECTURES)
    found = ARCHITECTURES[kind]
    for key, allowed in {**found.must, "quantization_config": (None,)}.items():
        if config.get(key) not in allowed:
            values = ", ".join(repr(value) for value in allowed if value is not None) or "none"
            raise ModelFileError(f"{checkpoint.folder}: {kind} with {key} {repr(config[key])[:60]}; allowed: {values}")
    rope = rotary_settings(config)["rope_type"]
    if rope not in found.rope_kinds:
        allowed_kinds = ", ".join(found.rope_kinds)
        raise ModelFileError(f"{kind} with rotary scaling {rope!r} cannot be converted; allowed: {allowed_kinds}")
    check_unrotated_layers(checkpoint, found)
    return found

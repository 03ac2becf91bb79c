"""Routed experts, gpt-oss and Gemma 4 on our kernels against transformers, with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.engines.onnx import OnnxEngine
from edgespec.kernels.library import library_path
from edgespec.types import Batch

torch: Any = pytest.importorskip("torch", reason="compares with transformers, which needs torch")
transformers: Any = pytest.importorskip("transformers", reason="compares with transformers")
pytest.importorskip("gguf", reason="tiny models are written by the package gguf: scripts/run.py install export")

from tiny_architectures import with_halves  # noqa: E402
from tiny_mixtures import CASES, Case, Floats, tensors, write  # noqa: E402

pytestmark = pytest.mark.skipif(
    library_path() is None, reason="the kernels are not built: scripts/run.py test builds them"
)
IDS = np.random.default_rng(5).integers(3, 250, 40).tolist()
MODULES = {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "gemma4": "gemma4"}


def kinds(case: Case) -> list[str]:
    names = ("full_attention", "sliding_attention")
    return [names[case.is_windowed(layer)] for layer in range(case.layers)]


def common(case: Case) -> dict[str, Any]:
    return {
        "vocab_size": case.tokens(),
        "hidden_size": case.width,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "max_position_embeddings": case.context,
        "rms_norm_eps": case.epsilon,
        "tie_word_embeddings": case.is_gemma,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }


def qwen3moe(case: Case) -> Any:
    count, used, inner = case.experts
    return transformers.Qwen3MoeConfig(
        **common(case),
        head_dim=case.size,
        intermediate_size=case.inner,
        moe_intermediate_size=inner,
        num_experts=count,
        num_experts_per_tok=used,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": case.base},
    )


def gpt_oss(case: Case) -> Any:
    count, used, inner = case.experts
    factor, trained, fast, slow = case.yarn
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(trained), "truncate": False}
    return transformers.GptOssConfig(
        **common(case),
        head_dim=case.size,
        intermediate_size=inner,
        num_local_experts=count,
        num_experts_per_tok=used,
        sliding_window=case.window,
        layer_types=kinds(case),
        rope_parameters={**yarn, "beta_fast": fast, "beta_slow": slow, "rope_theta": case.base},
    )


def gemma4(case: Case) -> Any:
    count, used, inner = case.experts
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": case.base}
    return transformers.Gemma4TextConfig(
        **common(case),
        head_dim=case.size_windowed,
        global_head_dim=case.size,
        num_global_key_value_heads=case.kv_heads_full,
        intermediate_size=case.inner,
        sliding_window=case.window,
        layer_types=kinds(case),
        final_logit_softcapping=case.cap,
        vocab_size_per_layer_input=case.tokens(),
        hidden_size_per_layer_input=case.per_layer,
        attention_k_eq_v=not case.has_values,
        num_kv_shared_layers=case.sharing,
        use_double_wide_mlp=bool(case.per_layer),
        enable_moe_block=bool(count),
        num_experts=count or None,
        top_k_experts=used or None,
        moe_intermediate_size=inner or None,
        rope_parameters={
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": case.base_windowed},
        },
    )


OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
ATTENTION = {"attn_q.": "q_proj.", "attn_k.": "k_proj.", "attn_v.": "v_proj.", "attn_output.": "o_proj."}
ATTENTION |= {"attn_q_norm.": "q_norm.", "attn_k_norm.": "k_norm."}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "layer_output_scale.weight": "layer_scalar",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
}
GEMMA = {
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
}


def state(case: Case) -> Iterator[tuple[str, Floats]]:
    """The weights by the names that transformers has for them."""
    found = tensors(case)
    for name, values in found.items():
        if name in OUTER:
            yield OUTER[name], values
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            own = {**LAYER, **(GEMMA if case.is_gemma else {})}
            prefix = next((start for start in ATTENTION if rest.startswith(start)), None)
            if rest in own:
                yield f"model.layers.{layer}.{own[rest]}", values
            elif prefix:
                yield f"model.layers.{layer}.self_attn.{ATTENTION[prefix]}{rest.removeprefix(prefix)}", values
    for layer in range(0 if case.is_gemma else case.layers):
        blk, mlp = f"blk.{layer}.", f"model.layers.{layer}.mlp."
        gate, up, down = (found[f"{blk}ffn_{kind}_exps.weight"] for kind in ("gate", "up", "down"))
        router = found[f"{blk}ffn_gate_inp.weight"]
        if case.is_gpt_oss:  # gate and up by turns, inputs first
            both = np.stack((gate, up), axis=2).reshape(len(gate), -1, case.width)
            yield f"{mlp}experts.gate_up_proj", both.swapaxes(1, 2)
            yield f"{mlp}experts.down_proj", down.swapaxes(1, 2)
            biases = [found[f"{blk}ffn_{kind}_exps.bias"] for kind in ("gate", "up")]
            yield f"{mlp}experts.gate_up_proj_bias", np.stack(biases, axis=2).reshape(len(gate), -1)
            yield f"{mlp}experts.down_proj_bias", found[f"{blk}ffn_down_exps.bias"]
            yield f"{mlp}router.weight", router
            yield f"{mlp}router.bias", found[f"{blk}ffn_gate_inp.bias"]
        else:
            yield f"{mlp}experts.gate_up_proj", np.concatenate((gate, up), axis=1)
            yield f"{mlp}experts.down_proj", down
            yield f"{mlp}gate.weight", router
            yield f"model.layers.{layer}.post_attention_layernorm.weight", found[f"{blk}ffn_norm.weight"]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case, short = CASES[name], MODULES[CASES[name].kind]
    module = import_module(f"transformers.models.{short}.modeling_{short}")
    monkeypatch.setattr(module, "eager_attention_forward", with_halves(module.eager_attention_forward))
    config = {"qwen3moe": qwen3moe, "gpt-oss": gpt_oss, "gemma4": gemma4}[case.kind](case)
    made = {"qwen3moe": "Qwen3MoeForCausalLM", "gpt-oss": "GptOssForCausalLM", "gemma4": "Gemma4ForCausalLM"}
    model = getattr(module, made[case.kind])(config).double().eval()
    weights = {key: torch.from_numpy(np.ascontiguousarray(values)) for key, values in state(case)}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        wanted = model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    with OnnxEngine.load(write(tmp_path / "tiny.gguf", case), threads=1) as engine:
        found = engine.forward(Batch.chain(IDS)).copy()
    assert np.sqrt(np.square(found - wanted).mean()) < 1e-4 * wanted.std()

"""The supported architectures as tables: tensors with their shapes and changes, sizes, required settings, layers.

Settings that llama.cpp does not support are rejected by name before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgespec.errors import ModelFileError
from edgespec.formats.checkpoint import Checkpoint, Config, Weights, unsupported

# Transformations of a tensor's values, done by `apply`.
AS_IS, PERMUTE_Q, PERMUTE_K, ADD_ONE, TRANSPOSE = range(5)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A row of the tensor table. `shape` in letters: d hidden, f inner, q query rows, k key rows, h head size,
    v vocabulary, c context, a heads, e experts, x inner of an expert; 3d = 3 x d; others are an architecture's own.
    """

    name: str
    shape: str
    change: int = AS_IS
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes in config.json that determine tensor shapes; `others`: of some architectures, by their letters."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    experts: int = 0
    expert_inner: int = 0
    others: Mapping[str, int] = field(default_factory=dict)

    def shape(self, letters: str) -> tuple[int, ...]:
        """'q d' -> (heads * head_dim, width)."""
        numbers = {
            "d": self.width,
            "f": self.inner,
            "2f": 2 * self.inner,
            "q": self.heads * self.head_dim,
            "q+2k": (self.heads + 2 * self.kv_heads) * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "h": self.head_dim,
            "v": self.vocabulary,
            "c": self.context,
            "3d": 3 * self.width,
            "a": self.heads,
            "e": self.experts,
            "x": self.expert_inner,
            "2x": 2 * self.expert_inner,
            "1": 1,
            "2d": 2 * self.width,
            "2q": 2 * self.heads * self.head_dim,
            **self.others,
        }
        return tuple(numbers[letter] for letter in letters.split())


def read_sizes(checkpoint: Checkpoint) -> Sizes:
    count, config = checkpoint.count, checkpoint.config
    heads = count("num_attention_heads")
    head_dim = count("head_dim") if config.get("head_dim") else count("hidden_size") // heads
    if head_dim % 2:
        raise ModelFileError(
            f"{checkpoint.folder / 'config.json'} has heads of {head_dim} numbers; allowed: an even one"
        )
    return Sizes(
        layers=count("num_hidden_layers"),
        width=count("hidden_size"),
        inner=count("intermediate_size"),
        heads=heads,
        kv_heads=count("num_key_value_heads") if config.get("num_key_value_heads") else heads,
        head_dim=head_dim,
        vocabulary=count("vocab_size"),
        context=count("max_position_embeddings"),
    )


def read_gpt2_sizes(checkpoint: Checkpoint) -> Sizes:
    count = checkpoint.count
    width, heads = count("n_embd"), count("n_head")
    inner = count("n_inner") if checkpoint.config.get("n_inner") else 4 * width
    return Sizes(
        count("n_layer"), width, inner, heads, heads, width // heads, count("vocab_size"), count("n_positions")
    )


@dataclass(frozen=True)
class Architecture:
    """How one architecture is converted.

    `name`: llama.cpp's name; `outer`: tensors outside the layers by Hugging Face name; `layer`: those of a layer by the
    rest of the name after `layer_prefix` and number; `must`: allowed values of settings that llama.cpp hard-codes;
    `head_is_tied` None: as config.json says, and `ties_by_default` where that says nothing.
    """

    name: str
    outer: Mapping[str, Tensor]
    layer: Mapping[str, Tensor]
    layer_prefix: str = "model.layers."
    optional_prefix: str = "model."
    norm_epsilon: str = "rms_norm_eps"
    sizes: Callable[[Checkpoint], Sizes] = read_sizes
    must: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    head_is_tied: bool | None = None
    ties_by_default: bool = False
    rope_kinds: tuple[str, ...] = ("default", "linear")
    has_window: bool = False
    fixed_attention_scale_layers: int = 0  # at this number of layers llama.cpp scales attention by width / heads

    def is_tied(self, settings: Mapping[str, Any]) -> bool:
        """Whether the output projection is the embedding matrix; some configs leave out what transformers implies."""
        return bool(settings.get("tie_word_embeddings", self.head_is_tied or self.ties_by_default))


def interleave_rotary(weights: Weights, heads: int) -> Weights:
    """Reorder rows [heads * head_dim, ...] from Hugging Face's two halves to interleaved rotary pairs."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def apply(change: int, weights: Weights, sizes: Sizes) -> Weights:
    if change == PERMUTE_Q:
        return interleave_rotary(weights, sizes.heads)
    if change == PERMUTE_K:
        return interleave_rotary(weights, sizes.kv_heads)
    if change == TRANSPOSE:
        return np.ascontiguousarray(weights.T)
    return weights + np.float32(1) if change == ADD_ONE else weights


def _check_built_in(checkpoint: Checkpoint, found: Architecture) -> None:
    """Raise ModelFileError for settings of single architectures that llama.cpp derives from the model's shape."""
    config = checkpoint.config
    if found.name == "smollm3":
        layers, interval = checkpoint.count("num_hidden_layers"), config.get("no_rope_layer_interval") or 4
        usual = [int((index + 1) % 4 != 0) for index in range(layers)]
        if (config.get("no_rope_layers") or (usual if interval == 4 else [])) != usual:
            raise ModelFileError(
                f"{checkpoint.folder}: llama.cpp's SmolLM3 has no rotary positions in each fourth layer, and in no "
                "others as this checkpoint has. Prune it by whole groups of four"
            )
    if found.fixed_attention_scale_layers:
        sizes = found.sizes(checkpoint)
        is_largest = sizes.layers == found.fixed_attention_scale_layers
        built_in = sizes.width // sizes.heads if is_largest else sizes.head_dim
        if (scalar := config.get("query_pre_attn_scalar") or sizes.head_dim) != built_in:
            raise ModelFileError(
                f"{checkpoint.folder}: its query_pre_attn_scalar is {scalar!r:.40}; allowed: {built_in}"
            )


def layer_kinds(checkpoint: Checkpoint, found: Architecture, layers: int) -> list[bool]:
    """Whether each layer has sliding attention, [layers]."""
    config = checkpoint.config
    if found.name != "llama" and (kinds := config.get("layer_types")):  # whose layers are all alike, whatever it says
        known = {"sliding_attention": True, "full_attention": False}
        if len(kinds) != layers or not set(kinds) <= known.keys():
            raise ModelFileError(f"{checkpoint.folder}: layer_types must hold {layers} of {', '.join(known)}")
        return [known[kind] for kind in kinds]
    if found.has_window:
        every = int(config.get("sliding_window_pattern") or 6)
        return [(index + 1) % every != 0 for index in range(layers)]
    if checkpoint.architecture == "MistralForCausalLM":
        return [window_of(checkpoint) is not None] * layers
    if config.get("use_sliding_window") and window_of(checkpoint):  # Qwen: the first layers have full attention
        return [index >= int(config.get("max_window_layers", layers)) for index in range(layers)]
    return [False] * layers


def window_of(checkpoint: Checkpoint) -> int | None:
    """Sliding window in tokens, or None. The default of Mistral and Gemma, 4096, is omitted in their config.json."""
    found = checkpoint.config.get("sliding_window", 4096)
    return int(found) if found else None


# rotary positions


def rotary_settings(config: Config) -> dict[str, Any]:
    """Rotary settings of transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`) as one dict.

    For a model with settings per kind of layer (Gemma 3), those of full attention. Raises ModelFileError.
    """
    new, old = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for found in (new, old):
        if not isinstance(found, dict):
            raise ModelFileError(f"config.json has rotary settings {str(found)[:60]!r}; they must be an object")
    settings = dict(new.get("full_attention") or new or old)
    settings.pop("sliding_attention", None)
    settings.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    settings.setdefault("rope_type", settings.get("type", "default"))
    _check_rotary(settings)
    return settings


def _check_rotary(settings: dict[str, Any]) -> None:
    """Raise ModelFileError for numbers that no rotation can have."""
    needed = ["rope_theta", *(["factor"] if settings["rope_type"] == "linear" else [])]
    for name in needed:
        value = settings.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelFileError(f"config.json's rotary settings have {name} {value!r:.40}; a number above 0 is needed")


def window_frequency_base(config: Config) -> float | None:
    """The rotary base of layers with sliding attention if it differs (Gemma 3), else None."""
    found = config.get("rope_parameters")
    if isinstance(found, dict) and isinstance(found.get("sliding_attention"), dict):
        return float(found["sliding_attention"].get("rope_theta", 10000.0))
    base = config.get("rope_local_base_freq")
    return None if base is None else float(base)


def llama3_frequency_factors(settings: dict[str, Any], head_dim: int) -> Weights:
    """Divisors [head_dim / 2] of the rotary frequencies for Llama 3.1's context extension. KeyError, ValueError."""
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = (float(settings[key]) for key in keys)
    if not (factor > 0 and original > 0 and high > low):
        raise ValueError(f"llama3 rotary scaling with {', '.join(keys)} of {factor:g}, {low:g}, {high:g}, {original:g}")
    frequencies = float(settings["rope_theta"]) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


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
LLAMA_ATTENTION = {
    **ATTENTION,
    **INTERLEAVED,
    "self_attn.q_proj.bias": Tensor("attn_q.bias", "q", PERMUTE_Q, is_optional=True),
    "self_attn.k_proj.bias": Tensor("attn_k.bias", "k", PERMUTE_K, is_optional=True),
    "self_attn.v_proj.bias": Tensor("attn_v.bias", "k", is_optional=True),
    "self_attn.o_proj.bias": Tensor("attn_output.bias", "d", is_optional=True),
}
LLAMA_LAYER = {
    **TWO_NORMS,
    **LLAMA_ATTENTION,
    **MLP,
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
FOUR_NORMS = {
    "input_layernorm.weight": Tensor("attn_norm.weight", "d", ADD_ONE),
    "post_attention_layernorm.weight": Tensor("post_attention_norm.weight", "d", ADD_ONE),
    "pre_feedforward_layernorm.weight": Tensor("ffn_norm.weight", "d", ADD_ONE),
    "post_feedforward_layernorm.weight": Tensor("post_ffw_norm.weight", "d", ADD_ONE),
}
GEMMA3_LAYER = {
    **FOUR_NORMS,
    **ATTENTION,
    **MLP,
    "self_attn.q_norm.weight": Tensor("attn_q_norm.weight", "h", ADD_ONE),
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
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        LLAMA_OUTER,
        SMOLLM3_LAYER,
        must={**SILU, "use_sliding_window": (False, None)},  # its windows lie in the layers without rotary positions
        ties_by_default=True,
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3",
        GEMMA_OUTER,
        GEMMA3_LAYER,
        must={**TANH_GELU, "attn_logit_softcapping": (None,)},
        ties_by_default=True,
        has_window=True,
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
    kind = checkpoint.architecture
    if kind not in ARCHITECTURES:
        raise unsupported(checkpoint.folder, kind, "GGUF", ARCHITECTURES)
    found, config, folder = ARCHITECTURES[kind], checkpoint.config, checkpoint.folder
    for key, allowed in {**found.must, "quantization_config": (None,)}.items():
        if (value := config.get(key)) not in allowed:
            values = ", ".join(repr(each) for each in allowed if each is not None) or "none"
            raise ModelFileError(f"{folder}: its {key} is {value!r:.60}; allowed: {values}")
    rope = rotary_settings(config)
    if (scaling := rope["rope_type"]) not in found.rope_kinds:
        kinds = ", ".join(found.rope_kinds)
        raise ModelFileError(f"{folder}: its rotary positions are scaled by {scaling!r:.40}; allowed: {kinds}")
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1, 1.0):
        raise ModelFileError(f"{folder}: its partial_rotary_factor is {part!r:.40}; allowed: 1")
    _check_built_in(checkpoint, found)
    return found

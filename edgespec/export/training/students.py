"""The sizes of a student and its config.json. Needs no torch.

A new student is a Llama, which every converter supports. A student that starts from layers of its target has the
target's architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.errors import CapabilityError, ConfigError
from edgespec.export.training.request import DistillRequest, flag
from edgespec.export.training.target import TargetFacts

HEAD_DIM = 64
NORM_EPS = 1e-5
LAYERS_CAN_BE_TAKEN_FROM = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class StudentShape:
    """Sizes of a student. `layers_of_target`: the target's layers that it starts from, or empty."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int
    layers_of_target: tuple[int, ...] = ()

    def parameters(self, vocab_size: int) -> int:
        """Number of weights with a tied head, without biases and norms of attention heads."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return vocab_size * self.hidden + self.layers * layer + self.hidden

    def config(self, target: TargetFacts) -> dict[str, Any]:
        """config.json of the student, for transformers' AutoConfig."""
        if self.layers_of_target:
            return _shortened(target.config, self.layers_of_target)
        kept = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": target.size("vocab_size"),
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": target.size("max_position_embeddings"),
            "rms_norm_eps": NORM_EPS,
            "tie_word_embeddings": True,
            **{key: target.config[key] for key in kept if key in target.config},
        }


def _shortened(config: dict[str, Any], layers: tuple[int, ...]) -> dict[str, Any]:
    """The target's config with only these layers, also in per-layer lists."""
    changed = {**config, "num_hidden_layers": len(layers)}
    if config.get("layer_types"):
        changed["layer_types"] = [config["layer_types"][layer] for layer in layers]
    return changed


def student_shape(request: DistillRequest, target: TargetFacts) -> StudentShape:
    """The requested sizes; defaults: half the target's width, a quarter of its layers, attention heads of 64.

    Raises ConfigError for inconsistent sizes, CapabilityError if the target does not support `init`.
    """
    if request.init:
        return _from_layers(request, target)
    hidden = request.hidden or max(HEAD_DIM, target.size("hidden_size") // 2 // HEAD_DIM * HEAD_DIM)
    if request.heads is None and hidden % HEAD_DIM:
        low = hidden // HEAD_DIM * HEAD_DIM
        near = f"{low} or {low + HEAD_DIM}" if low else f"{HEAD_DIM}"
        raise ConfigError(f"--hidden {hidden} is not a multiple of {HEAD_DIM}: give {near}, or also --heads")
    heads = request.heads or hidden // HEAD_DIM
    if hidden % heads or hidden // heads % 2:
        raise ConfigError(f"--hidden {hidden} must be a multiple of --heads {heads}, with heads of even width")
    kv_heads = request.kv_heads or max(n for n in range(1, max(1, heads // 2) + 1) if heads % n == 0)
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} is not divisible by --kv-heads {kv_heads}")
    layers = request.layers or max(1, target.size("num_hidden_layers") // 4)
    return StudentShape(layers, hidden, heads, kv_heads, request.ffn or 3 * hidden, hidden // heads)


def _from_layers(request: DistillRequest, target: TargetFacts) -> StudentShape:
    if target.kind not in LAYERS_CAN_BE_TAKEN_FROM:
        known = ", ".join(LAYERS_CAN_BE_TAKEN_FROM)
        raise CapabilityError(f"--init layers: is supported for {known}; the target is {target.kind!r}: omit it")
    last = target.size("num_hidden_layers") - 1
    bad = [layer for layer in request.init if layer > last]
    if bad or len(set(request.init)) < len(request.init):
        raise ConfigError(
            f"--init must name different layers from 0 to {last}, got {', '.join(map(str, request.init))}"
        )
    own = {
        "layers": len(request.init),
        "hidden": target.size("hidden_size"),
        "heads": target.size("num_attention_heads"),
        "kv_heads": target.kv_heads,
        "ffn": target.size("intermediate_size"),
    }
    for name, value in own.items():
        asked = getattr(request, name)
        if asked not in (None, value):
            raise ConfigError(f"{flag(name)} {asked} conflicts with --init, which sets it to {value}: omit it")
    return StudentShape(**own, head_dim=target.head_dim, layers_of_target=request.init)

"""Graphs whose layers are not all those of a Llama; only our own operators compute them, so there is no other form.

Routed experts: each token's feed-forward is the weighted sum of a few of many (Shazeer et al., 2017). A router's logits
choose them and, by a softmax over the chosen, weigh them: as in Qwen3 MoE, gpt-oss and Gemma 4. In Qwen3.5 MoE one more
expert, which all tokens share, is weighed by the sigmoid of a logit of its own, in Granite 4 H it is added as it is. In
LFM2 MoE each expert is weighed by the sigmoid of its logit, its choice also by a preference, and the first layers have
no experts.
Hybrids: some layers have attention, others keep a running state of a text (Qwen3.5, LFM2, Granite 4 H).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from edgespec.formats.onnx.forms import Floats
from edgespec.formats.onnx.graph import Ports, port
from edgespec.formats.onnx.llama import KernelGraph
from edgespec.formats.onnx.llama_config import Experts, LlamaConfig
from edgespec.formats.onnx.tiles import (
    DELTA_NET,
    DOMAIN,
    EXPERTS,
    FEATURES,
    GATES,
    LAYOUT_VERSION,
    MAMBA,
    ROWS,
    SHORT_CONV,
    STATES,
)


class ExpertsGraph(KernelGraph):
    """A Llama whose layers have experts instead of one feed-forward."""

    def _feed_forward(self, layer: int) -> None:
        experts = self._config.experts
        if experts is None or layer < experts.first_layer:
            super()._feed_forward(layer)
            return
        state = self._norm(f"layers.{layer}/post_attention_layernorm")
        shared = self._dense(layer, state) if experts.has_shared else ""
        self._delta = self._experts(layer, experts, state, state, shared=shared if experts.gates_shared else "")
        if shared and not experts.gates_shared:
            name = f"/model/layers.{layer}/mlp/Add"
            self._nodes.add("Add", [self._delta, shared], [f"{name}/output_0"], name)
            self._delta = f"{name}/output_0"
        self._after(layer, "post_feedforward")

    def _experts(
        self, layer: int, experts: Experts, routed: str, state: str, scales: str = "", shared: str = ""
    ) -> str:
        """The experts of `state`, chosen by `routed`, and `shared`; `scales` [experts]: of their results."""
        here, there = f"/model/layers.{layer}/mlp", f"model.layers.{layer}.mlp"
        logits, output = f"{here}/router/MatMul/output_0", f"{here}/experts/output_0"
        bias = self._stored(f"{there}.router.bias") if experts.has_biases else ""
        routers = [f"{there}.router.weight", *([f"{there}.shared_gate.weight"] if shared else [])]
        self._form.products(f"{here}/router/MatMul", routed, routers, [logits], bias)
        kinds = ["gate", "down"] if experts.is_joined else ["gate", "down", "up"]
        sources = [f"{there}.experts.{kind}.weight" for kind in kinds]
        biases = [self._stored(f"{there}.experts.{kind}.bias") if experts.has_biases else "" for kind in kinds]
        preference = self._stored(f"{there}.router.preference") if experts.has_preference else ""
        missing = [""] * (3 - len(kinds))
        self._nodes.add(
            EXPERTS,
            [
                *(state, logits, *biases, *missing, scales, *map(self._form.tiles, sources)),
                *([*missing, shared] if shared or preference else []),
                *([preference] if preference else []),
            ],
            [output],
            f"{here}/experts",
            domain=DOMAIN,
            K=self._config.hidden_size,
            F=experts.inner,
            experts=experts.count,
            used=experts.used,
            gate=GATES[experts.gate],
            types=[self._form.type_number(source) for source in sources],
            layout=LAYOUT_VERSION,
        )
        return output


@dataclass(frozen=True, slots=True)
class HybridConfig(LlamaConfig):
    """`recurrent_layers` are gated delta nets with `value_heads` heads of `state_size`, or short convolutions (0), or
    Mamba-2, whose heads have values of `value_size` and keys of `state_size`.

    `taps`: inputs that a result of a convolution sees; `has_gated_attention`: each head of queries comes with a gate;
    `is_nextn`: the one layer, of attention, predicts a further token from states of another model.
    """

    recurrent_layers: frozenset[int] = frozenset()
    taps: int = 0
    key_heads: int = 0
    value_heads: int = 0
    state_size: int = 0
    value_size: int = 0
    has_gated_attention: bool = False
    is_nextn: bool = False


class HybridGraph(ExpertsGraph):
    """Recurrent layers in the place of some layers' attention."""

    _config: HybridConfig

    def values(self) -> Ports:
        inputs, outputs = super().values()
        return [*inputs, port(STATES, [1], TensorProto.INT64)], outputs

    def _heads(self, layer: int) -> dict[str, int]:
        before = layer - self._states_before(layer)
        gated = int(self._config.has_gated_attention)
        return super()._heads(layer) | {"first_head": before * self._config.num_kv_heads, "gated": gated}

    def _states_before(self, layer: int) -> int:
        """How many recurrent layers come before a layer."""
        return sum(each < layer for each in self._config.recurrent_layers)

    def _attention(self, layer: int) -> None:
        config, state = self._config, f"layers.{layer}/input_layernorm"
        if layer not in config.recurrent_layers:
            super()._attention(layer)
            return
        name, mixer = ("conv", self._short_convolution)
        if config.value_heads:
            name, mixer = ("mamba", self._mamba) if config.value_size else ("linear_attn", self._delta_net)
        here, there = f"/model/layers.{layer}/{name}", f"model.layers.{layer}.{name}"
        result = mixer(layer, here, there, self._norm(state))
        self._delta = self._product(f"{here}/out_proj/MatMul", result, (f"{there}.out_proj",))
        self._after(layer, "post_attention")

    def _state_sizes(self, layer: int) -> dict[str, int]:
        """Attributes of a recurrent layer's operator."""
        config = self._config
        return {
            "layer": self._states_before(layer),
            "key_heads": config.key_heads,
            "value_heads": config.value_heads,
            "size": config.state_size,
            "value_size": config.value_size or config.state_size,
        }

    def _delta_net(self, layer: int, here: str, there: str, state: str) -> str:
        mixed, rates = (
            self._product(f"{here}/in_proj_{kinds}/MatMul", state, tuple(f"{there}.in_proj_{kind}" for kind in split))
            for kinds, split in (("qkvz", ("qkv", "z")), ("ba", ("b", "a")))
        )
        vectors = [self._stored(f"{there}.{name}") for name in ("dt_bias", "A", "norm.weight")]
        inputs = [mixed, rates, self._kernel(f"{there}.conv1d.weight"), *vectors, ROWS, STATES]
        name, sizes, epsilon = f"{here}/DeltaNet", self._state_sizes(layer), self._config.norm_epsilon
        self._nodes.add(DELTA_NET, inputs, [f"{name}/output_0"], name, domain=DOMAIN, **sizes, epsilon=epsilon)
        return f"{name}/output_0"

    def _mamba(self, layer: int, here: str, there: str, state: str) -> str:
        mixed = self._product(
            f"{here}/in_proj/MatMul", state, tuple(f"{there}.in_proj_{part}" for part in ("bc", "x", "z"))
        )
        times = self._product(f"{here}/dt_proj/MatMul", state, (f"{there}.in_proj_dt",))
        vectors = [self._stored(f"{there}.{name}") for name in ("dt_bias", "A", "D")]
        shift = self._nodes.store(f"{there}.conv1d.bias", self._turned(self._form.vector(f"{there}.conv1d.bias")))
        inputs = [mixed, times, self._kernel(f"{there}.conv1d.weight"), *vectors, shift, ROWS, STATES]
        name, gated = f"{here}/Mamba2", f"{here}/Mamba2/output_0"
        self._nodes.add(MAMBA, inputs, [gated], name, domain=DOMAIN, **self._state_sizes(layer))
        return self._plain_norm(f"{here}/norm/Norm", gated, self._stored(f"{there}.norm.weight"), f"{here}/normed")

    def _short_convolution(self, layer: int, here: str, there: str, state: str) -> str:
        parts = self._product(f"{here}/in_proj/MatMul", state, (f"{there}.in_proj",))
        inputs = [parts, self._kernel(f"{there}.conv.weight"), ROWS, STATES]
        name, result = f"{here}/ShortConv", f"{here}/ShortConv/output_0"
        self._nodes.add(SHORT_CONV, inputs, [result], name, domain=DOMAIN, layer=self._states_before(layer))
        return result

    def _kernel(self, name: str) -> str:
        """A convolution's kernel [taps, channels], which files have as [channels, taps]."""
        kernel = self._turned(self._form.vector(name).reshape(-1, self._config.taps))
        return self._nodes.store(name, np.ascontiguousarray(kernel.T))

    def _turned(self, channels: Floats) -> Floats:
        """What a convolution reads [channels, ...] as the operators have it: of Mamba the values come last."""
        return np.roll(channels, -self._config.value_heads * self._config.value_size, axis=0)


class NextnGraph(HybridGraph):
    """Attention over pairs of a `FEATURES` row, a state of the text, and the embedding of the token behind it."""

    def values(self) -> Ports:
        return self._values_with_states(self._config.hidden_size)

    def _embed(self) -> None:
        super()._embed()
        here, there = "/model/nextn", "model.layers.0"
        normed = [
            self._plain_norm(f"{here}/{kind}/Norm", value, self._stored(f"{there}.{kind}.weight"), f"{here}/{kind}")
            for kind, value in (("enorm", self._residual), ("hnorm", FEATURES))
        ]
        self._nodes.add("Concat", normed, [f"{here}/pair"], f"{here}/Concat", axis=-1)
        self._residual = self._product(f"{here}/eh_proj/MatMul", f"{here}/pair", (f"{there}.eh_proj",))

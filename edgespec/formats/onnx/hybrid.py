"""Graphs of hybrids: some layers have attention, others keep a running state of a text (Qwen3.5, LFM2, Granite 4 H).

Only our own operators compute these layers, so there is no other form of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgespec.formats.onnx.experts import ExpertsGraph
from edgespec.formats.onnx.forms import Floats
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.formats.onnx.tiles import DELTA_NET, DOMAIN, FEATURES, MAMBA, ROWS, SHORT_CONV, STATES


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

    def values(self) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        inputs, outputs = super().values()
        return [*inputs, helper.make_tensor_value_info(STATES, TensorProto.INT64, [1])], outputs

    def _heads(self, layer: int) -> dict[str, int]:
        before = layer - self._states_before(layer)
        gated = int(self._config.has_gated_attention)
        return super()._heads(layer) | {"first_head": before * self._config.num_kv_heads, "gated": gated}

    def _states_before(self, layer: int) -> int:
        """How many recurrent layers come before a layer."""
        return sum(each < layer for each in self._config.recurrent_layers)

    def _attention(self, layer: int) -> None:
        if layer not in self._config.recurrent_layers:
            super()._attention(layer)
        elif self._config.value_size:
            self._mamba(layer)
        elif self._config.value_heads:
            self._delta_net(layer)
        else:
            self._short_convolution(layer)
        if layer in self._config.recurrent_layers:
            self._after(layer, "post_attention")

    def _delta_net(self, layer: int) -> None:
        config, here, there = self._config, f"/model/layers.{layer}/linear_attn", f"model.layers.{layer}.linear_attn"
        state = self._norm(f"layers.{layer}/input_layernorm")
        mixed, rates = (
            self._product(f"{here}/in_proj_{kinds}/MatMul", state, tuple(f"{there}.in_proj_{kind}" for kind in split))
            for kinds, split in (("qkvz", ("qkv", "z")), ("ba", ("b", "a")))
        )
        vectors = [self._stored(f"{there}.{name}") for name in ("dt_bias", "A", "norm.weight")]
        result = f"{here}/DeltaNet/output_0"
        self._nodes.add(
            DELTA_NET,
            [mixed, rates, self._kernel(f"{there}.conv1d.weight"), *vectors, ROWS, STATES],
            [result],
            f"{here}/DeltaNet",
            domain=DOMAIN,
            layer=self._states_before(layer),
            key_heads=config.key_heads,
            value_heads=config.value_heads,
            size=config.state_size,
            value_size=config.state_size,
            epsilon=config.norm_epsilon,
        )
        self._delta = self._product(f"{here}/out_proj/MatMul", result, (f"{there}.out_proj",))

    def _mamba(self, layer: int) -> None:
        config, here, there = self._config, f"/model/layers.{layer}/mamba", f"model.layers.{layer}.mamba"
        state = self._norm(f"layers.{layer}/input_layernorm")
        mixed = self._product(
            f"{here}/in_proj/MatMul", state, tuple(f"{there}.in_proj_{part}" for part in ("bc", "x", "z"))
        )
        times = self._product(f"{here}/dt_proj/MatMul", state, (f"{there}.in_proj_dt",))
        vectors = [self._stored(f"{there}.{name}") for name in ("dt_bias", "A", "D")]
        shift = self._nodes.store(f"{there}.conv1d.bias", self._turned(self._form.vector(f"{there}.conv1d.bias")))
        gated = f"{here}/Mamba2/output_0"
        self._nodes.add(
            MAMBA,
            [mixed, times, self._kernel(f"{there}.conv1d.weight"), *vectors, shift, ROWS, STATES],
            [gated],
            f"{here}/Mamba2",
            domain=DOMAIN,
            layer=self._states_before(layer),
            key_heads=config.key_heads,
            value_heads=config.value_heads,
            size=config.state_size,
            value_size=config.value_size,
        )
        normed = self._plain_norm(f"{here}/norm/Norm", gated, self._stored(f"{there}.norm.weight"), f"{here}/normed")
        self._delta = self._product(f"{here}/out_proj/MatMul", normed, (f"{there}.out_proj",))

    def _short_convolution(self, layer: int) -> None:
        here, there = f"/model/layers.{layer}/conv", f"model.layers.{layer}.conv"
        state = self._norm(f"layers.{layer}/input_layernorm")
        parts = self._product(f"{here}/in_proj/MatMul", state, (f"{there}.in_proj",))
        inputs = [parts, self._kernel(f"{there}.conv.weight"), ROWS, STATES]
        name, result = f"{here}/ShortConv", f"{here}/ShortConv/output_0"
        self._nodes.add(SHORT_CONV, inputs, [result], name, domain=DOMAIN, layer=self._states_before(layer))
        self._delta = self._product(f"{here}/out_proj/MatMul", result, (f"{there}.out_proj",))

    def _kernel(self, name: str) -> str:
        """A convolution's kernel [taps, channels], which files have as [channels, taps]."""
        kernel = self._turned(self._form.vector(name).reshape(-1, self._config.taps))
        return self._nodes.store(name, np.ascontiguousarray(kernel.T))

    def _turned(self, channels: Floats) -> Floats:
        """What a convolution reads [channels, ...] as the operators have it: of Mamba the values come last."""
        return np.roll(channels, -self._config.value_heads * self._config.value_size, axis=0)


class NextnGraph(HybridGraph):
    """Attention over pairs of a `FEATURES` row, a state of the text, and the embedding of the token behind it."""

    def values(self) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        inputs, outputs = super(HybridGraph, self).values()
        shape = ["batch_size", "sequence_length", self._config.hidden_size]
        return [*inputs, helper.make_tensor_value_info(FEATURES, TensorProto.FLOAT, shape)], outputs

    def _embed(self) -> None:
        super()._embed()
        here, there = "/model/nextn", "model.layers.0"
        normed = [
            self._plain_norm(f"{here}/{kind}/Norm", value, self._stored(f"{there}.{kind}.weight"), f"{here}/{kind}")
            for kind, value in (("enorm", self._residual), ("hnorm", FEATURES))
        ]
        self._nodes.add("Concat", normed, [f"{here}/pair"], f"{here}/Concat", axis=-1)
        self._residual = self._product(f"{here}/eh_proj/MatMul", f"{here}/pair", (f"{there}.eh_proj",))

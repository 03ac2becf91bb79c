"""The layer of an EAGLE head as a graph of our operators (arXiv 2401.15077; EAGLE-3: 2503.01840).

A row is a pair of a state of the text and the embedding of the token after it. `FEATURES` holds both, or the state
alone where the embedding is looked up. A first matrix makes the two a layer's input, or, in EAGLE-3, they go normed
into its attention side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import onnx
from onnx import TensorProto, helper

from edgespec.formats.onnx.forms import HEAD
from edgespec.formats.onnx.llama import KernelGraph
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.formats.onnx.tiles import FEATURES, NEXT_STATES

ENCODER = "model.fc.weight"


@dataclass(frozen=True, slots=True)
class HeadConfig(LlamaConfig):
    """`feature_size`: of the target's states that a matrix makes one, of a head that looks embeddings up.

    `part`: "encoder" for the graph of that matrix, which a text passes through once; "chain" for DSpark's.
    """

    feature_size: int = 0
    part: Literal["", "encoder", "chain"] = ""


@dataclass(frozen=True, slots=True)
class EagleConfig(HeadConfig):
    """`is_fused`: an EAGLE-3 head, whose layer starts from the normed state where it `norms_residual`."""

    is_fused: bool = False
    norms_residual: bool = False


class EagleGraph(KernelGraph):
    """Gives logits of the vocabulary that is always scored, and the state that takes the place of the next one.

    That is the one which is scored, or in EAGLE-3 the one before the last norm.
    """

    _config: EagleConfig

    def values(self) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        inputs, outputs = super().values()
        info, place, width = helper.make_tensor_value_info, ["batch_size", "sequence_length"], self._config.hidden_size
        if self._config.is_fused:
            outputs.append(info(NEXT_STATES, TensorProto.FLOAT, [*place, width]))
        read = width if self._config.feature_size else 2 * width
        return [*inputs, info(FEATURES, TensorProto.FLOAT, [*place, read])], outputs

    def _embed(self) -> None:
        here, there = "/model/pair", "model.layers.0"
        if self._config.feature_size:
            super()._embed()
            halves = [FEATURES, self._residual]
        else:
            self._store_tables()
            halves = [f"{here}/state", f"{here}/embedded"]
        if not self._config.is_fused:
            self._residual = self._product(f"{here}/fc/MatMul", FEATURES, ("model.fc",))
            return
        if not self._config.feature_size:
            self._nodes.add("Split", [FEATURES], halves, f"{here}/Split", axis=-1, num_outputs=2)
        state, embedded = (
            self._plain_norm(f"{here}/{name}/Norm", half, self._stored(f"{there}.{name}.weight"), f"{here}/{name}")
            for half, name in zip(halves, ("state_norm", "embedding_norm"), strict=True)
        )
        self._nodes.add("Concat", [embedded, state], [f"{here}/both"], f"{here}/Concat", axis=-1)
        self._residual = state if self._config.norms_residual else halves[0]

    def _input(self, layer: int, kind: str) -> str:
        if self._config.is_fused and kind == "input":
            return "/model/pair/both"
        return super()._input(layer, kind)

    def _head(self) -> None:
        if not self._config.is_fused:
            super()._head()
            return
        state = self._norm(f"layers.{self._config.num_layers}/final_norm_layernorm")
        self._form.products("/lm_head/MatMul", state, [HEAD], ["logits"])
        self._nodes.add("Identity", [self._residual], [NEXT_STATES], "/model/Identity")


class EagleEncoder(KernelGraph):
    """The state that an EAGLE-3 head makes of `FEATURES`, the inputs of several of the target's layers."""

    _config: EagleConfig

    def values(self) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        sizes = (FEATURES, self._config.feature_size), (NEXT_STATES, self._config.hidden_size)
        read, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size]) for name, size in sizes)
        return [read], [made]

    def parts(self) -> Iterator[None]:
        self._product("/model/fc/MatMul", FEATURES, ("model.fc",), NEXT_STATES)
        yield

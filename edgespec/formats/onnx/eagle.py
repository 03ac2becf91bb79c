"""The layer of an EAGLE head as a graph of our operators (arXiv 2401.15077; EAGLE-3: 2503.01840).

A row is a pair of a state of the text and the embedding of the token after it. `FEATURES` holds both, and a first
matrix makes the two a layer's input. In EAGLE-3 it holds the state alone, and the two go normed into its attention side
by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from edgespec.formats.onnx.forms import HEAD
from edgespec.formats.onnx.graph import Ports, port
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
    """EAGLE-3's has a `feature_size`; its layer starts from the normed state where it `norms_residual`."""

    norms_residual: bool = False


class EagleGraph(KernelGraph):
    """Gives logits of the vocabulary that is always scored; the state behind them takes the place of the next one."""

    def values(self) -> Ports:
        return self._values_with_states(2 * self._config.hidden_size)

    def _embed(self) -> None:
        self._store_tables()
        self._residual = self._product("/model/pair/fc/MatMul", FEATURES, ("model.fc",))


class Eagle3Graph(KernelGraph):
    """Gives logits, and the state before the last norm, which takes the place of the next one."""

    _config: EagleConfig

    def values(self) -> Ports:
        return self._values_with_states(self._config.hidden_size, self._config.hidden_size)

    def _embed(self) -> None:
        super()._embed()
        here, there = "/model/pair", "model.layers.0"
        state, embedded = (
            self._plain_norm(f"{here}/{name}/Norm", half, self._stored(f"{there}.{name}.weight"), f"{here}/{name}")
            for half, name in ((FEATURES, "state_norm"), (self._residual, "embedding_norm"))
        )
        self._nodes.add("Concat", [embedded, state], [f"{here}/both"], f"{here}/Concat", axis=-1)
        self._residual = state if self._config.norms_residual else FEATURES

    def _input(self, layer: int, kind: str) -> str:
        return "/model/pair/both" if kind == "input" else super()._input(layer, kind)

    def _head(self) -> None:
        state = self._norm(f"layers.{self._config.num_layers}/final_norm_layernorm")
        self._form.products("/lm_head/MatMul", state, [HEAD], ["logits"])
        self._nodes.add("Identity", [self._residual], [NEXT_STATES], "/model/Identity")


class EagleEncoder(KernelGraph):
    """The state that an EAGLE-3 head makes of `FEATURES`, the inputs of several of the target's layers."""

    _config: EagleConfig

    def values(self) -> Ports:
        read, made = ["rows", self._config.feature_size], ["rows", self._config.hidden_size]
        return [port(FEATURES, read)], [port(NEXT_STATES, made)]

    def parts(self) -> Iterator[None]:
        self._product("/model/fc/MatMul", FEATURES, ("model.fc",), NEXT_STATES)
        yield

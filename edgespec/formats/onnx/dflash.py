"""DFlash and DSpark heads as graphs of our operators (arXiv 2602.06036, 2607.05147).

Qwen3 layers denoise a block, the last token of a text and mask tokens behind it, whose rows see one another and the
text. Of that their cache holds the keys and values that a graph of its own, the encoder, makes of states of the target.
DSpark's chain moves the scores of each row of the block by the token before it; DFlash2's moves those of the likeliest
few, of which a path is chosen. In DFlash2 attention and feed-forward have a convolution over the block in front and one
behind them, whose kernels are sums of fixed ones and of what a matrix makes of each row, for groups of channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from edgespec.formats.onnx.eagle import ENCODER, HeadConfig
from edgespec.formats.onnx.graph import TOKENS, Ports, port
from edgespec.formats.onnx.llama import KernelGraph, Tables, rotary_tables
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.formats.onnx.tiles import CACHE, FEATURES, ROWS

MARKOV, FOLLOWERS, CONFIDENCE = "model.markov.weight", "model.followers.weight", "model.confidence.weight"
CONFIDENCE_BIAS, SELECTOR, WRITTEN = "model.confidence.bias", "model.selector.weight", "written"


@dataclass(frozen=True, slots=True)
class BlockConfig(HeadConfig):
    """`block_size`: most rows behind a text; `has_confidence`: of DSpark, whose chain tells a row's acceptance, too.

    `num_candidates` of a row of DFlash2, whose convolutions see `kernel_size` rows, in groups of `group_size` channels.
    """

    block_size: int = 0
    has_confidence: bool = False
    num_candidates: int = 0
    kernel_size: int = 0
    group_size: int = 0


class BlockGraph(KernelGraph):
    _config: BlockConfig

    def _rotary_tables(self, config: LlamaConfig) -> Tables:
        return rotary_tables(replace(config, max_positions=config.max_positions + self._config.block_size))

    def _input(self, layer: int, kind: str) -> str:
        return self._convolved(layer, "attn" if kind == "input" else "mlp", super()._input(layer, kind), 0)

    def _attention(self, layer: int) -> None:
        super()._attention(layer)
        self._delta = self._convolved(layer, "attn", self._delta, 1)

    def _feed_forward(self, layer: int) -> None:
        super()._feed_forward(layer)
        self._delta = self._convolved(layer, "mlp", self._delta, 1)

    def _convolved(self, layer: int, part: str, value: str, side: int) -> str:
        """`value` [1, block, width] with the kernels of a `side`, 0: in front, made of that value; 1: behind."""
        config, add, store = self._config, self._nodes.add, self._nodes.store
        taps, size, width = config.kernel_size, config.group_size, config.hidden_size
        if not taps:
            return value
        there = f"model.layers.{layer}.{part}_conv"
        here, kernels = f"/{there}/{side}", [f"/{there}/kernel_{number}" for number in range(2 * taps)]
        if not side:
            made = self._product(f"/{there}/MatMul", value, (there,))
            add("Split", [made], kernels, f"/{there}/Split", axis=-1, num_outputs=2 * taps)
        base = self._form.vector(f"{there}.base").reshape(2, taps, width // size, size)
        groups = store(f"{here}/shape", np.array([0, -1, width // size, size]))
        add("Reshape", [value, groups], [f"{here}/groups"], f"{here}/Reshape")
        terms = []
        for tap in range(taps):
            at, last = f"{here}/{tap}", store("edgespec.last_axis", np.array([-1]))
            add("Unsqueeze", [kernels[side * taps + tap], last], [f"{at}/kernel"], f"{at}/Unsqueeze")
            add("Add", [f"{at}/kernel", store(f"{at}/base", base[side, tap])], [f"{at}/sum"], f"{at}/Add")
            shift = store(f"{at}/shift", np.array([0, tap, 0, 0, 0, -tap, 0, 0]))  # zeros come from before the block
            add("Pad", [f"{here}/groups", shift], [f"{at}/shifted"], f"{at}/Pad")
            add("Mul", [f"{at}/shifted", f"{at}/sum"], [f"{at}/term"], f"{at}/Mul")
            terms.append(f"{at}/term")
        add("Sum", terms, [f"{here}/terms"], f"{here}/Sum")
        return self._reshape(f"{here}/terms", width, f"{here}/Reshape_1")


class BlockEncoder(BlockGraph):
    """Writes keys and values of the tokens of `FEATURES`. There are no queries: keys are in their place."""

    def values(self) -> Ports:
        rows, cache = port(ROWS, ["rows", 4], TensorProto.INT32), port(CACHE, [1], TensorProto.INT64)
        written = port(WRITTEN, ["rows", self._config.num_kv_heads * self._config.head_dim])
        return [port(FEATURES, ["rows", self._config.feature_size]), rows, cache], [written]

    def parts(self) -> Iterator[None]:
        self._config = replace(self._config, num_heads=self._config.num_kv_heads, has_sinks=False)
        self._store_tables()
        fused = self._product("/model/fc/MatMul", FEATURES, (ENCODER.removesuffix(".weight"),))
        self._residual = self._plain_norm(
            "/model/state_norm/Norm", fused, self._stored("model.state_norm.weight"), "/model/states"
        )
        # A graph computes only what a result depends on.
        seen = [self._attended(layer) for layer in range(self._config.num_layers)]
        self._nodes.add("Sum", seen, [WRITTEN], "/model/Sum")
        yield

    def _input(self, layer: int, kind: str) -> str:
        return self._residual

    def _projections(self, layer: int) -> Sequence[str]:
        return "kkv"


class BlockChain(BlockGraph):
    """What follows the first of `input_ids`, a row whose state is in `FEATURES`: of all tokens, or of the other ids."""

    def values(self) -> Ports:
        config = self._config
        inputs, outputs = [port("input_ids", TOKENS, TensorProto.INT64)], [port("scores", None)]
        if config.has_confidence or config.num_candidates:
            inputs.append(port(FEATURES, ["batch_size", 1, config.hidden_size]))
        if config.has_confidence:
            outputs.append(port("confidence", [*TOKENS, 1]))
        return inputs, outputs

    def parts(self) -> Iterator[None]:
        self._form.look_up(MARKOV, "known", "/markov/TiledLookup")
        if self._config.num_candidates:
            self._path()
            yield
            return
        self._form.products("/followers/MatMul", "known", [FOLLOWERS], ["scores"])
        if self._config.has_confidence:
            self._nodes.add("Concat", [FEATURES, "known"], ["pair"], "/confidence/Concat", axis=-1)
            bias = self._stored(CONFIDENCE_BIAS) if "confidence" in self._config.biases else ""
            self._form.products("/confidence/MatMul", "pair", [CONFIDENCE], ["logit"], bias)
            self._nodes.add("Sigmoid", ["logit"], ["confidence"], "/confidence/Sigmoid")
        yield

    def _path(self) -> None:
        add, first, last = self._nodes.add, self._nodes.store("first", np.array([0])), np.array([-1])
        self._form.look_up(FOLLOWERS, "followers", "/followers/TiledLookup")
        self._form.products("/selector/MatMul", FEATURES, [SELECTOR], ["wanted"])
        add("Gather", ["known", first], ["before"], "/markov/Gather", axis=1)
        add("Mul", ["before", "wanted"], ["both"], "/selector/Mul")
        add("Mul", ["followers", "both"], ["products"], "/followers/Mul")
        add("ReduceSum", ["products", self._nodes.store("last", last)], ["scores"], "/followers/ReduceSum", keepdims=0)

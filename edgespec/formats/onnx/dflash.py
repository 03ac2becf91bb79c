"""DFlash and DSpark heads as graphs of our operators (arXiv 2602.06036, 2607.05147).

Qwen3 layers denoise a block, the last token of a text and mask tokens behind it, whose rows see one another and the
text. Of that their cache holds the keys and values that a graph of its own, the encoder, makes of states of the target.
DSpark's chain moves the scores of each row of the block by the token before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto, helper

from edgespec.formats.onnx.eagle import ENCODER, HeadConfig
from edgespec.formats.onnx.llama import KernelGraph, Tables, rotary_tables
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.formats.onnx.tiles import CACHE, FEATURES, ROWS

MARKOV, FOLLOWERS, CONFIDENCE = "model.markov.weight", "model.followers.weight", "model.confidence.weight"
CONFIDENCE_BIAS, WRITTEN = "model.confidence.bias", "written"


@dataclass(frozen=True, slots=True)
class BlockConfig(HeadConfig):
    """`block_size`: most rows behind a text; `has_confidence`: of DSpark, whose chain tells a row's acceptance, too."""

    block_size: int = 0
    has_confidence: bool = False


class BlockGraph(KernelGraph):
    _config: BlockConfig

    def _rotary_tables(self, config: LlamaConfig) -> Tables:
        return rotary_tables(replace(config, max_positions=config.max_positions + self._config.block_size))


class BlockEncoder(BlockGraph):
    """Writes keys and values of the tokens of `FEATURES`. There are no queries: keys are in their place."""

    def values(self) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        config, info = self._config, helper.make_tensor_value_info
        inputs = [
            info(FEATURES, TensorProto.FLOAT, ["rows", config.feature_size]),
            info(ROWS, TensorProto.INT32, ["rows", 4]),
            info(CACHE, TensorProto.INT64, [1]),
        ]
        return inputs, [info(WRITTEN, TensorProto.FLOAT, ["rows", config.num_kv_heads * config.head_dim])]

    def parts(self) -> Iterator[None]:
        self._config = replace(self._config, num_heads=self._config.num_kv_heads)
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
    """What follows one token: of `input_ids`, and with a confidence of its row's state in `FEATURES`."""

    def values(self) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        config, info, place = self._config, helper.make_tensor_value_info, ["batch_size", "sequence_length"]
        inputs = [info("input_ids", TensorProto.INT64, place)]
        outputs = [info("scores", TensorProto.FLOAT, [*place, config.vocab_size])]
        if config.has_confidence:
            inputs.append(info(FEATURES, TensorProto.FLOAT, [*place, config.hidden_size]))
            outputs.append(info("confidence", TensorProto.FLOAT, [*place, 1]))
        return inputs, outputs

    def parts(self) -> Iterator[None]:
        self._form.look_up(MARKOV, "known", "/markov/TiledLookup")
        self._form.products("/followers/MatMul", "known", [FOLLOWERS], ["scores"])
        if self._config.has_confidence:
            self._nodes.add("Concat", [FEATURES, "known"], ["pair"], "/confidence/Concat", axis=-1)
            bias = self._stored(CONFIDENCE_BIAS) if "confidence" in self._config.biases else ""
            self._form.products("/confidence/MatMul", "pair", [CONFIDENCE], ["logit"], bias)
            self._nodes.add("Sigmoid", ["logit"], ["confidence"], "/confidence/Sigmoid")
        yield

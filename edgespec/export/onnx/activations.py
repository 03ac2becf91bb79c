"""How large the inputs of a graph's products get on a text: what smoothing needs to know of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.engines.onnx.calibration import TEXT
from edgespec.engines.onnx.sessions import open_session
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.formats.onnx import MODEL
from edgespec.formats.onnx.forms import LlamaWeights, WholeNumbers
from edgespec.formats.onnx.graph import Nodes
from edgespec.formats.onnx.llama_config import LlamaConfig

MOST_TOKENS = 512


class RecordedProducts(WholeNumbers):
    """w8a8 that notes which matrices read which value, in `readers`."""

    def __init__(
        self, weights: LlamaWeights, nodes: Nodes, readers: dict[str, list[str]], *, is_unsigned: bool
    ) -> None:
        super().__init__(weights, nodes, is_unsigned=is_unsigned)
        self._readers = readers

    def product(self, name: str, value: str, sources: Sequence[str], output: str) -> None:
        self._readers.setdefault(value, []).extend(sources)
        super().product(name, value, sources, output)


def largest_inputs(
    folder: Path, config: LlamaConfig, readers: dict[str, list[str]], threads: int
) -> dict[str, NDArray[np.float32]]:
    """Largest magnitude of each input [inputs] by the name of a matrix, over a text of several kinds.

    `folder` holds the graph, which `RecordedProducts` wrote with `readers`, and its tokenizer. Raises ModelFileError.
    """
    model = onnx.load(folder / MODEL, load_external_data=False)
    del model.graph.output[:]
    for place, value in enumerate(readers):
        # The graph takes the magnitudes of a product's inputs anyway, to find their scales.
        name = f"edgespec.largest.{place}"
        model.graph.node.append(
            helper.make_node("ReduceMax", [f"{value}/w8a8/Abs", "edgespec.rows"], [name], keepdims=0)
        )
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["inputs"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 1]), "edgespec.rows"))
    session, _ = open_session(model.SerializeToString(), folder, threads=threads, provider="cpu")
    found = session.run(None, _feeds(folder, config))
    return {source: largest for sources, largest in zip(readers.values(), found, strict=True) for source in sources}


def _feeds(folder: Path, config: LlamaConfig) -> dict[str, NDArray[np.generic]]:
    vocabulary = TokenizerFile(folder, config.vocab_size)
    ids = vocabulary.encode(TEXT, add_bos=vocabulary.adds_bos)[: min(MOST_TOKENS, config.max_positions)]
    token_ids = np.array([ids], np.int64)
    empty = np.zeros((1, config.num_kv_heads, 0, config.head_dim), np.float32)
    past = {f"past_key_values.{n}.{kind}": empty for n in range(config.num_layers) for kind in ("key", "value")}
    return {"input_ids": token_ids, "attention_mask": np.ones_like(token_ids), **past}

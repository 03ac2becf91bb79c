"""The weights of the demo's Llama graph, which onnxruntime-genai's model builder wrote in 8 bits, as float32.

The reverse of an export, for what writes another graph of this model. Weights are read when they are asked for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgespec.formats.onnx import MODEL
from edgespec.formats.onnx.graph import read_tensor

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_PRODUCTS = {
    "self_attn.o_proj": "attn/o_proj",
    "mlp.gate_proj": "mlp/gate_proj",
    "mlp.up_proj": "mlp/up_proj",
    "mlp.down_proj": "mlp/down_proj",
}
_JOINED = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2}
_MIDDLE = 128
Weights = NDArray[np.float32]


class LlamaGraph:
    """The export in `folder`. `config` is its config.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        graph = onnx.load(str(folder / MODEL), load_external_data=False).graph
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes = {node.name.removesuffix("_Q8"): node for node in graph.node}
        (self._table,) = (node for node in graph.node if node.op_type == "GatherBlockQuantized")

    def weights(self, name: str) -> Weights:
        """A tensor by its Hugging Face name, matrices as [outputs, inputs]."""
        if name == "model.embed_tokens.weight":
            return self._grouped(self._read(self._table.input[0]), self._read(self._table.input[2]))
        if name == "lm_head.weight":
            return self._product("/lm_head/MatMul")
        if name == "model.norm.weight":
            return self._stored(f"model.layers.{self.config['num_hidden_layers']}.final_norm_layernorm.weight")
        found = _LAYER.fullmatch(name)
        assert found is not None, name
        here, kind = f"/model/layers.{found[1]}", found[2]
        if kind in _JOINED:
            heads, size = self.config["num_attention_heads"], self.config["head_dim"]
            ends = np.cumsum([0, heads, *[self.config["num_key_value_heads"]] * 2]) * size
            rows, part = self._product(f"{here}/attn/qkv_proj/MatMul"), _JOINED[kind]
            return rows[ends[part] : ends[part + 1]]
        return self._product(f"{here}/{_PRODUCTS[kind]}/MatMul") if kind in _PRODUCTS else self._stored(name)

    def _stored(self, name: str) -> Weights:
        return self._read(name).astype(np.float32, copy=False)

    def _product(self, name: str) -> Weights:
        node = self._nodes[name]
        return self._grouped(self._read(node.input[1]), self._read(node.input[2]))

    def _grouped(self, codes: NDArray[Any], scales: NDArray[Any]) -> Weights:
        """Groups of a row's codes times their scales: [rows, inputs]."""
        rows = len(codes)
        groups = codes.reshape(rows, scales.size // rows, -1).astype(np.float32) - _MIDDLE
        found: Weights = (groups * scales.reshape(rows, -1, 1).astype(np.float32)).reshape(rows, -1)
        return found

    def _read(self, name: str) -> NDArray[Any]:
        return read_tensor(self._tensors[name], self.folder)

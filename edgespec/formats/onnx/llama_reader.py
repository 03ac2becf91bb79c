"""The weights of a Llama graph that onnxruntime-genai's model builder wrote in 8 bits, as float32 by Hugging Face name.

The reverse of an export, for what makes another model of this one. Weights are read when they are asked for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.formats.onnx import MODEL
from edgespec.formats.onnx.graph import read_tensor
from edgespec.installation import IMPORT_FAILURES, not_importable

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
    """The export in `folder`. `config` is its config.json.

    Raises ModelFileError for a folder without such an export, and CapabilityError without `onnx`.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import onnx
            from google.protobuf.message import DecodeError
        except IMPORT_FAILURES as exc:
            raise not_importable("reading ONNX files", exc, "onnx") from exc
        self.folder = folder
        try:
            self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            graph = onnx.load(str(folder / MODEL), load_external_data=False).graph
        except (OSError, ValueError, DecodeError) as exc:
            raise ModelFileError(f"{folder} is not a Llama export that can be read: {exc}") from exc
        if not isinstance(self.config, dict):
            raise ModelFileError(f"{folder / 'config.json'} does not contain a JSON object")
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes = {node.name.removesuffix("_Q8"): node for node in graph.node}
        self._tables = [node for node in graph.node if node.op_type == "GatherBlockQuantized"]

    def require(self, key: str) -> Any:
        """A value of config.json that no model of this kind may lack."""
        if self.config.get(key) is None:
            raise ModelFileError(f"{self.folder / 'config.json'} lacks {key!r}")
        return self.config[key]

    def weights(self, name: str) -> Weights:
        """A tensor by its Hugging Face name, matrices as [outputs, inputs]. Raises ModelFileError."""
        if name == "model.embed_tokens.weight":
            return self._embedding()
        if name == "lm_head.weight":
            return self._product("/lm_head/MatMul")
        if name == "model.norm.weight":
            return self._stored(f"model.layers.{self.require('num_hidden_layers')}.final_norm_layernorm.weight")
        found = _LAYER.fullmatch(name)
        if found is None:
            raise ModelFileError(f"a Llama has no tensor {name!r}")
        here, kind = f"/model/layers.{found[1]}", found[2]
        if kind in _JOINED:
            return self._joined(self._product(f"{here}/attn/qkv_proj/MatMul"), _JOINED[kind])
        return self._product(f"{here}/{_PRODUCTS[kind]}/MatMul") if kind in _PRODUCTS else self._stored(name)

    def _joined(self, rows: Weights, part: int) -> Weights:
        """Queries, keys or values of a matrix that holds all three."""
        heads, size = int(self.require("num_attention_heads")), int(self.require("head_dim"))
        ends = np.cumsum([0, heads, *[int(self.require("num_key_value_heads"))] * 2]) * size
        if ends[-1] != len(rows):
            raise ModelFileError(f"{self.folder / MODEL} is damaged: its attention and config.json do not agree")
        return rows[ends[part] : ends[part + 1]]

    def _stored(self, name: str) -> Weights:
        values = self._read(name)
        return values.astype(np.float32, copy=False)

    def _product(self, name: str) -> Weights:
        node = self._nodes.get(name)
        if node is None or node.op_type != "MatMulNBits" or any(node.input[3:]):
            raise self._unknown(name)
        return self._grouped(self._read(node.input[1]), self._read(node.input[2]), name)

    def _embedding(self) -> Weights:
        if len(self._tables) != 1 or any(self._tables[0].input[3:]):
            raise self._unknown("embedding")
        node = self._tables[0]
        return self._grouped(self._read(node.input[0]), self._read(node.input[2]), "embedding")

    def _grouped(self, codes: NDArray[Any], scales: NDArray[Any], name: str) -> Weights:
        """Groups of a row's codes times their scales: [rows, inputs]."""
        rows = len(codes)
        if codes.dtype != np.uint8 or rows == 0 or codes.size % scales.size or scales.size % rows:
            raise self._unknown(name)
        groups = codes.reshape(rows, scales.size // rows, -1).astype(np.float32) - _MIDDLE
        found: Weights = (groups * scales.reshape(rows, -1, 1).astype(np.float32)).reshape(rows, -1)
        return found

    def _read(self, name: str) -> NDArray[Any]:
        if name not in self._tensors:
            raise self._unknown(name)
        return read_tensor(self._tensors[name], self.folder)

    def _unknown(self, name: str) -> ModelFileError:
        return ModelFileError(
            f"{self.folder / MODEL} has no {name} in 8 bits as the model builder writes it: export it again as int8"
        )

"""Writes a Llama as a w8a8 graph: `model.onnx` and its weights, one matrix in memory at a time, without torch.

Operators and names are those of onnxruntime-genai's model builder, whose products `export.onnx.integer` turns into
whole numbers, so that all that reads an export (`engines.onnx`, cutting after a layer) reads this too.
What this module does not know: where the weights come from. Biases, sliding windows and scaled rotary positions are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.errors import ModelFileError
from edgespec.formats.onnx import DATA, MICROSOFT, MODEL
from edgespec.formats.onnx.tensors import DataWriter
from edgespec.formats.onnx.w8a8 import CONSTANTS, Products

Progress = Callable[[int, int], None]
OPERATOR_SET, FILE_VERSION = 22, 10
Codes = tuple[NDArray[np.int8], NDArray[np.float32]]
_LENGTHS = "/model/attn_mask_reformat/attn_mask_subgraph/Sub/Cast/output_0"
_TOTAL = "/model/attn_mask_reformat/attn_mask_subgraph/Gather/Cast/output_0"


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama, `max_positions` of its context, and its two constants."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> Self:
        """From a config.json of Hugging Face. Raises ModelFileError for what the graph cannot be."""
        if config.get("architectures") != ["LlamaForCausalLM"] or config.get("hidden_act", "silu") != "silu":
            raise ModelFileError(f"only a Llama with silu can be written, got {config.get('architectures')}")
        rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rotary.get("rope_type", rotary.get("type", "default"))
        unknown = [key for key in ("attention_bias", "mlp_bias", "sliding_window") if config.get(key)]
        if unknown or kind != "default":
            what = ", ".join(unknown) or f"rotary positions of the kind {kind!r}"
            raise ModelFileError(f"a Llama with {what} cannot be written as a graph")
        try:
            heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                hidden_size=width,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or width // heads),
                vocab_size=int(config["vocab_size"]),
                max_positions=int(config["max_position_embeddings"]),
                norm_epsilon=float(config["rms_norm_eps"]),
                rope_theta=float(config.get("rope_theta") or rotary.get("rope_theta", 10000.0)),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as exc:
            raise ModelFileError(f"config.json is incomplete or damaged: {exc!r}") from exc


class LlamaWeights(Protocol):
    """Weights by their Hugging Face names, quantised; the output projection is `lm_head.weight`, tied or not."""

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's weights [width]."""

    def product(self, name: str) -> Codes:
        """A matrix as a product reads it: codes [inputs, outputs] and scales [outputs]."""

    def embedding(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Codes [tokens, width], 128 for zero, and scales [tokens, groups] of the embeddings."""


def write_llama(folder: Path, config: LlamaConfig, weights: LlamaWeights, progress: Progress | None = None) -> None:
    """Write `model.onnx` and `model.onnx.data` into `folder`, which is nobody's yet.

    `progress` gets parts (done, total): the embedding, each layer, the head. Raises OSError, and what `weights` does.
    """
    with (folder / DATA).open("wb") as file:
        graph = _Graph(config, weights, DataWriter(file, DATA))
        parts = graph.parts()
        for done, _ in enumerate(parts, 1):
            if progress is not None:
                progress(done, config.num_layers + 2)
    (folder / MODEL).write_bytes(graph.model().SerializeToString())


def rotary_tables(config: LlamaConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [positions, half a head]."""
    halves = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1) / np.power(np.float32(config.rope_theta), halves)
    angles = np.arange(config.max_positions, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


class _Graph:
    """Operators and initialisers so far. `_residual` and `_delta` are the two values whose sum is the hidden state."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, data: DataWriter) -> None:
        self._config, self._weights, self._data = config, weights, data
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: list[onnx.TensorProto] = []
        self._products = Products(self._nodes)
        self._residual = self._delta = ""

    def parts(self) -> Iterator[None]:
        """Everything in the order of the computation; a step for the embedding, each layer, the head."""
        self._count_mask()
        self._embed()
        yield
        for layer in range(self._config.num_layers):
            self._attention(layer)
            self._feed_forward(layer)
            yield
        total = self._config.num_layers
        state = self._norm(f"layers.{total}/final_norm_layernorm", "model.norm.weight", is_last=True)
        self._product("/lm_head/MatMul", state, ("lm_head.weight",), "logits")
        yield

    def model(self) -> onnx.ModelProto:
        constants = [numpy_helper.from_array(value, name) for name, value in CONSTANTS.items()]
        inputs, outputs = self._values()
        graph = helper.make_graph(self._nodes, "main_graph", inputs, outputs, [*self._tensors, *constants])
        operators = [helper.make_opsetid("", OPERATOR_SET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=operators, ir_version=FILE_VERSION, producer_name="edgespec")

    def _values(self) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        """Inputs and outputs of the graph."""
        config = self._config
        whole, real, info = TensorProto.INT64, TensorProto.FLOAT, helper.make_tensor_value_info
        inputs = [
            info("input_ids", whole, ["batch_size", "sequence_length"]),
            info("attention_mask", whole, ["batch_size", "total_sequence_length"]),
        ]
        outputs = [info("logits", real, ["batch_size", "sequence_length", config.vocab_size])]
        for layer in range(config.num_layers):
            for kind in ("key", "value"):
                past = ["batch_size", config.num_kv_heads, "past_sequence_length", config.head_dim]
                inputs.append(info(f"past_key_values.{layer}.{kind}", real, past))
                present = ["batch_size", config.num_kv_heads, "total_sequence_length", config.head_dim]
                outputs.append(info(f"present.{layer}.{kind}", real, present))
        return inputs, outputs

    def _node(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], name: str, **attributes: Any) -> None:
        self._nodes.append(helper.make_node(kind, inputs, outputs, name, **attributes))

    def _store(self, name: str, values: NDArray[Any]) -> str:
        self._tensors.append(self._data.add(name, values))
        return name

    def _count_mask(self) -> None:
        """Lengths of past and whole, as attention takes them, from the ones of the attention mask."""
        start = "/model/attn_mask_reformat/attn_mask_subgraph"
        one, last = self._store("edgespec.ones", np.ones(1, np.int64)), self._store("edgespec.one", np.array(1))
        self._node("ReduceSum", ["attention_mask", one], [f"{start}/sum"], f"{start}/ReduceSum", keepdims=0)
        self._node("Sub", [f"{start}/sum", one], [f"{start}/lengths"], f"{start}/Sub")
        self._node("Cast", [f"{start}/lengths"], [_LENGTHS], f"{start}/Sub/Cast", to=TensorProto.INT32)
        self._node("Shape", ["attention_mask"], [f"{start}/shape"], f"{start}/Shape")
        self._node("Gather", [f"{start}/shape", last], [f"{start}/total"], f"{start}/Gather", axis=0)
        self._node("Cast", [f"{start}/total"], [_TOTAL], f"{start}/Gather/Cast", to=TensorProto.INT32)

    def _embed(self) -> None:
        codes, scales = self._weights.embedding()
        group_size = codes.shape[1] // scales.shape[1]
        inputs = [self._store("embedding_w8", codes), "input_ids", self._store("embedding_scale", scales)]
        self._residual = "/model/embed_tokens/Gather/output_0"
        self._node(
            "GatherBlockQuantized",
            inputs,
            [self._residual],
            "/model/embed_tokens/GatherBlockQuantized",
            domain=MICROSOFT,
            bits=8,
            block_size=group_size,
            gather_axis=0,
            quantize_axis=1,
        )
        for name, table in zip(("cos_cache", "sin_cache"), rotary_tables(self._config), strict=True):
            self._store(name, table)

    def _norm(self, place: str, source: str, *, is_last: bool = False) -> str:
        """The normed sum of residual and delta, which becomes the residual. Only the first norm has no delta."""
        weight = self._store(f"model.{place.replace('/', '.')}.weight", self._weights.vector(source))
        state, total = (f"/model/{place}/output_{number}" for number in (0, 3))
        epsilon = self._config.norm_epsilon
        if not self._delta:
            name = f"/model/{place}/LayerNorm"
            inputs = [self._residual, weight]
            self._node("SimplifiedLayerNormalization", inputs, [state], name, axis=-1, epsilon=epsilon, stash_type=1)
            return state
        inputs, outputs = [self._residual, self._delta, weight], [state] if is_last else [state, "", "", total]
        name = f"/model/{place}/SkipLayerNorm"
        self._node("SkipSimplifiedLayerNormalization", inputs, outputs, name, domain=MICROSOFT, epsilon=epsilon)
        self._residual = total
        return state

    def _product(self, name: str, value: str, sources: Sequence[str], output: str = "") -> str:
        """`value` times the matrices of these names side by side."""
        found = [self._weights.product(source) for source in sources]
        codes = found[0][0] if len(found) == 1 else np.concatenate([codes for codes, _ in found], axis=1)
        scales = np.concatenate([scales for _, scales in found])
        weight = f"{name.removeprefix('/').replace('/', '.')}.weight"
        names = self._store(f"{weight}_w8", codes), self._store(f"{weight}_scale", scales)
        output = output or f"{name}/output_0"
        self._products.add(name, value, names, [output])
        return output

    def _attention(self, layer: int) -> None:
        config, here, there = self._config, f"/model/layers.{layer}/attn", f"model.layers.{layer}.self_attn"
        state = self._norm(f"layers.{layer}/input_layernorm", f"model.layers.{layer}.input_layernorm.weight")
        sources = tuple(f"{there}.{kind}_proj.weight" for kind in "qkv")
        joined = self._product(f"{here}/qkv_proj/MatMul", state, sources)
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        seen = f"{here}/GroupQueryAttention/output_0"
        self._node(
            "GroupQueryAttention",
            [joined, "", "", *past, _LENGTHS, _TOTAL, "cos_cache", "sin_cache", "", "", ""],
            [seen, f"present.{layer}.key", f"present.{layer}.value"],
            f"{here}/GroupQueryAttention",
            domain=MICROSOFT,
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            scale=float(config.head_dim**-0.5),
            local_window_size=-1,
            softcap=0.0,
            do_rotary=1,
            rotary_interleaved=0,
        )
        self._delta = self._product(f"{here}/o_proj/MatMul", seen, (f"{there}.o_proj.weight",))

    def _feed_forward(self, layer: int) -> None:
        here, there = f"/model/layers.{layer}/mlp", f"model.layers.{layer}.mlp"
        place = f"layers.{layer}/post_attention_layernorm"
        state = self._norm(place, f"model.{place.replace('/', '.')}.weight")
        gate, up = (
            self._product(f"{here}/{kind}_proj/MatMul", state, (f"{there}.{kind}_proj.weight",))
            for kind in ("gate", "up")
        )
        self._node("Sigmoid", [gate], [f"{here}/act_fn/Sigmoid/output_0"], f"{here}/act_fn/Sigmoid")
        active, both = f"{here}/act_fn/Mul/output_0", f"{here}/Mul/output_0"
        self._node("Mul", [gate, f"{here}/act_fn/Sigmoid/output_0"], [active], f"{here}/act_fn/Mul")
        self._node("Mul", [active, up], [both], f"{here}/Mul")
        self._delta = self._product(f"{here}/down_proj/MatMul", both, (f"{there}.down_proj.weight",))

"""Graphs of the layer of an EAGLE head, from the arrays of a heads file: from pairs to scores in one pass.

Weights of 8 bits in groups are a quarter of the bytes of float32, which is what a draft of one row costs. Our kernels
multiply them where they are built, else ONNX Runtime's MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.formats.head_file import PROJECT, HeadFile, HeadManifest, Matrix
from edgespec.formats.onnx import MICROSOFT
from edgespec.formats.onnx.forms import quantise_rows
from edgespec.formats.onnx.graph import tensor_in_memory
from edgespec.formats.onnx.tiles import DOMAIN, PRODUCT, q8_0
from edgespec.kernels import tiles
from edgespec.kernels.library import library_path

GROUPS = (32, 16)  # weights that share a scale: the first that divides a width; another width keeps float32
TYPE = "Q8_0"
IR_VERSION, OPSET = 10, 21
WHOLE_INPUTS = 4  # accuracy_level of MatMulNBits: rows are quantised to 8 bits, too
CACHE, NEW_CACHE = ("keys", "values"), ("new_keys", "new_values")
Shape = tuple[int | str, ...]
Values = Mapping[str, tuple[Any, Shape]]  # type and shape of inputs or outputs


def state_name(sizes: HeadManifest) -> str:
    """The value that continues the text: of EAGLE-3 the one before the last norm, else the one that is scored."""
    return "end" if sizes.generation == 3 else "scored"


def fuse_graph(heads: HeadFile) -> Graph | None:
    """`features` [n, feature size] to `states` [n, width]; None for heads that read the last state only."""
    sizes, arrays = heads.manifest, heads.arrays
    if sizes.generation != 3 and not sizes.is_projected:
        return None
    graph, read = Graph(sizes.norm_eps), "features"
    if sizes.norms_features:
        graph.norm(read, arrays["feature_norm"], read := "normed")
    graph.product(read, arrays["fc" if sizes.generation == 3 else PROJECT], "states")
    graph.inputs = _rows(features=sizes.fused_size if sizes.generation == 3 else sizes.feature_size)
    graph.outputs = _rows(states=sizes.hidden_size)
    return graph


def layer_graph(heads: HeadFile) -> Graph:
    """A pass over n pairs, `asked` [m] of which are followed by a state and scored.

    GroupQueryAttention writes keys and values into the memory that holds the earlier ones. `latest`: the place of the
    last pair in it; `total`: the pairs in it; `places` of the new ones in the rotary tables; `bias` on their attention.
    """
    sizes, arrays, graph = heads.manifest, heads.arrays, Graph(heads.manifest.norm_eps)
    (_add_fused_pairs if sizes.generation == 3 else _add_pairs)(graph, heads)
    graph.add(
        "GroupQueryAttention",
        ["found", "", "", *CACHE, "latest", "total", "cos", "sin", "places", "bias"],
        "attended",
        *NEW_CACHE,
        domain=MICROSOFT,
        num_heads=sizes.heads,
        kv_num_heads=sizes.kv_heads,
        scale=float(sizes.head_dim**-0.5),
        do_rotary=1,
    )
    graph.add("Gather", ["attended", "asked"], "asked_attended", axis=1)
    graph.add("Gather", ["x", "asked"], "asked_x", axis=1)
    graph.product("asked_attended", arrays["o_proj"], "mixed")
    graph.add("Add", ["asked_x", "mixed"], "between")
    graph.norm("between", arrays["mlp_norm"], "normed_between")
    graph.product("normed_between", arrays["gate_proj"], "gate")
    graph.product("normed_between", arrays["up_proj"], "up")
    graph.add("Sigmoid", ["gate"], "open")
    graph.add("Mul", ["gate", "open"], "silu")
    graph.add("Mul", ["silu", "up"], "inner")
    graph.product("inner", arrays["down_proj"], "added")
    graph.add("Add", ["between", "added"], "end")
    graph.norm("end", arrays["norm"], "scored")
    rows = heads.frequent_rows
    graph.product("scored", rows * np.float32(sizes.scale), "scores")
    cache = (np.float32, (1, sizes.kv_heads, "capacity", sizes.head_dim))
    graph.inputs = {
        **_rows(1, states=sizes.hidden_size, embedded=sizes.hidden_size),
        **dict.fromkeys(("cos", "sin"), (np.float32, ("positions", sizes.head_dim // 2))),
        "places": (np.int64, (1, "n")),
        **dict.fromkeys(CACHE, cache),
        "latest": (np.int32, (1,)),
        "total": (np.int32, ()),
        "bias": (np.float32, (1, 1, "n", "pairs")),
        "asked": (np.int64, ("m",)),
    }
    graph.outputs = {
        state_name(sizes): (np.float32, (1, "m", sizes.hidden_size)),
        "scores": (np.float32, (1, "m", len(rows))),
        **dict.fromkeys(NEW_CACHE, cache),
    }
    return graph


def _add_pairs(graph: Graph, heads: HeadFile) -> None:
    """`x`, what the layer starts with, and `found`: queries, keys and values side by side."""
    graph.add("Concat", ["states", "embedded"], "pair", axis=2)
    graph.product("pair", heads.arrays["fc"], "x")
    graph.norm("x", heads.arrays["attention_norm"], "normed_x")
    graph.product("normed_x", _together(heads.arrays), "found")


def _add_fused_pairs(graph: Graph, heads: HeadFile) -> None:
    """The same of an EAGLE-3 head."""
    graph.norm("states", heads.arrays["state_norm"], "normed_states")
    graph.norm("embedded", heads.arrays["embedding_norm"], "normed_embedded")
    graph.add("Concat", ["normed_embedded", "normed_states"], "pair", axis=2)
    graph.product("pair", _together(heads.arrays), "found")
    graph.add("Identity", ["normed_states" if heads.manifest.norms_residual else "states"], "x")


def _rows(*before: int, **widths: int) -> dict[str, tuple[Any, Shape]]:
    """Values of n rows of these widths; `before`: the axes before them."""
    return {name: (np.float32, (*before, "n", width)) for name, width in widths.items()}


def _together(arrays: Mapping[str, Matrix]) -> Matrix:
    """The matrices of queries, keys and values as one."""
    return np.concatenate([arrays[f"{name}_proj"] for name in "qkv"])


class Graph:
    """Operators, weights, inputs and outputs; rows are the last axis but one."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon
        self._nodes: list[Any] = []
        self._weights: list[Any] = []
        self.arrays: dict[str, NDArray[Any]] = {}  # weights that a session has to be given
        self.num_bytes = 0
        self.inputs: Values = {}
        self.outputs: Values = {}

    def add(self, kind: str, inputs: list[str], *outputs: str, domain: str = "", **attributes: Any) -> None:
        from onnx import helper

        self._nodes.append(helper.make_node(kind, inputs, outputs, outputs[0], domain=domain, **attributes))

    def norm(self, value: str, weights: NDArray[np.float32], output: str) -> None:
        name = self._keep(f"{output}.weights", weights)
        self.add("SimplifiedLayerNormalization", [value, name], output, axis=-1, epsilon=self._epsilon, stash_type=1)

    def product(self, value: str, weights: NDArray[np.float32], output: str) -> None:
        """The product of `value` [..., K] with the rows of `weights` [N, K]."""
        count, width = weights.shape
        group = next((size for size in GROUPS if width % size == 0), None)
        if group is None:
            columns = self._keep(f"{output}.columns", np.ascontiguousarray(weights.T))
            self.add("MatMul", [value, columns], output)
            return
        if group == GROUPS[0] and library_path() is not None:
            self._tiled_product(value, weights, output)
            return
        codes, scales = quantise_rows(weights, group)
        names = [
            self._keep(f"{output}.codes", codes.reshape(count, width // group, group)),
            self._keep(f"{output}.scales", scales.reshape(-1)),
        ]
        sizes = {"K": width, "N": count, "bits": 8, "block_size": group, "accuracy_level": WHOLE_INPUTS}
        self.add("MatMulNBits", [value, *names], output, domain=MICROSOFT, **sizes)

    def _tiled_product(self, value: str, weights: NDArray[np.float32], output: str) -> None:
        """On our kernels, whose passes over the rows of a prompt or a tree cost little more than one over a row."""
        from onnx import helper

        count, width = weights.shape
        name = f"{output}.tiles"
        size = tiles.packed_bytes(TYPE, count, width)
        assert size is not None
        self.arrays[name] = packed = np.empty(size, np.uint8)
        tiles.pack(TYPE, q8_0(weights), width, packed)
        self._weights.append(tensor_in_memory(name, packed))
        self.num_bytes += size
        self.add(PRODUCT, [value, "", name], output, domain=DOMAIN, K=width, types=[tiles.TYPES[TYPE]])
        self._nodes[-1].attribute.append(helper.make_attribute("outputs", [count]))

    def _keep(self, name: str, array: NDArray[Any]) -> str:
        from onnx import numpy_helper

        self._weights.append(numpy_helper.from_array(array, name))
        self.num_bytes += array.nbytes
        return name

    def serialised(self) -> bytes:
        from onnx import helper

        given, made = (
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape)
                for name, (kind, shape) in values.items()
            ]
            for values in (self.inputs, self.outputs)
        )
        graph = helper.make_graph(self._nodes, "eagle", given, made, self._weights)
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(name, 1) for name in (MICROSOFT, DOMAIN))]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString())

"""The matrix products of an EAGLE head in ONNX Runtime, with weights of 8 bits in groups: a quarter of the bytes that
numpy reads, which is what a draft of one row costs.

The graph is made here, from the arrays of a heads file. Attention is the drafter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.head import LayerProducts, States
from edgespec.engines.onnx.library import library, translated
from edgespec.engines.onnx.sessions import open_session
from edgespec.formats.head_file import PROJECT, HeadFile, HeadManifest, Matrix
from edgespec.formats.onnx import MICROSOFT
from edgespec.formats.onnx.w8a8 import quantise_rows

GROUPS = (32, 16)  # weights that share a scale: the first that divides a width; another width keeps float32
IR_VERSION, OPSET = 10, 21
WHOLE_INPUTS = 4  # accuracy_level of MatMulNBits: rows are quantised to 8 bits, too
Value = tuple[str, int]  # name and width of a [n, width] input or output


class OnnxProducts(LayerProducts):
    """`heads` of the kind eagle, on `threads` threads of the CPU. Raises ModelFileError for weights that are no
    numbers."""

    _ends = "states", "states"  # names of the state that follows a pair, and of what is scored

    def __init__(self, heads: HeadFile, *, threads: int) -> None:
        manifest, arrays = heads.manifest, heads.arrays
        width, queries = manifest.hidden_size, manifest.heads * manifest.head_dim
        self.num_bytes = 0
        self._options = library().RunOptions()

        self._fuse = self._opened_fuse(manifest, arrays, threads)
        self._before = self._opened_before(manifest, arrays, threads)
        self._after = self._opened_after(heads, width, queries, threads)

    def _opened_fuse(self, manifest: HeadManifest, arrays: Mapping[str, Matrix], threads: int) -> Any:
        """None for heads that read the last state only."""
        if not manifest.is_projected:
            return None
        graph = _Graph(manifest.norm_eps)
        graph.product("features", arrays[PROJECT], "states")
        inputs, made = [("features", manifest.feature_size)], [("states", manifest.hidden_size)]
        return self._open(graph, inputs, made, threads)

    def _opened_before(self, manifest: HeadManifest, arrays: Mapping[str, Matrix], threads: int) -> Any:
        width, together = manifest.hidden_size, _together(arrays)
        graph = _Graph(manifest.norm_eps)
        graph.add("Concat", ["states", "embedded"], "pairs", axis=1)
        graph.product("pairs", arrays["fc"], "x")
        graph.norm("x", arrays["attention_norm"], "normed")
        graph.product("normed", together, "found")
        made = [("x", width), ("found", len(together))]
        return self._open(graph, [("states", width), ("embedded", width)], made, threads)

    def _opened_after(self, heads: HeadFile, width: int, queries: int, threads: int) -> Any:
        arrays, graph = heads.arrays, _Graph(heads.manifest.norm_eps)
        graph.product("attended", arrays["o_proj"], "mixed")
        graph.add("Add", ["x", "mixed"], "between")
        graph.norm("between", arrays["mlp_norm"], "normed")
        graph.product("normed", arrays["gate_proj"], "gate")
        graph.product("normed", arrays["up_proj"], "up")
        graph.add("Sigmoid", ["gate"], "open")
        graph.add("Mul", ["gate", "open"], "silu")
        graph.add("Mul", ["silu", "up"], "inner")
        graph.product("inner", arrays["down_proj"], "added")
        state, scored = self._ends
        graph.add("Add", ["between", "added"], "end")
        graph.norm("end", arrays["norm"], scored)
        graph.product(scored, heads.frequent_rows * np.float32(heads.manifest.scale), "scores")
        made = [(state, width), ("scores", len(heads.frequent_rows))]
        return self._open(graph, [("x", width), ("attended", queries)], made, threads)

    def _open(self, graph: _Graph, inputs: Sequence[Value], outputs: Sequence[Value], threads: int) -> Any:
        self.num_bytes += graph.num_bytes
        serialised = graph.serialised(inputs, outputs)
        session, _ = open_session(serialised, Path(), threads=threads, provider="cpu")
        return session

    def fuse(self, features: States) -> States:
        assert self._fuse is not None
        with translated(self._options):
            found: States = self._fuse.run(None, {"features": features}, self._options)[0]
        return found

    def before(self, states: States, embedded: States) -> tuple[States, States]:
        with translated(self._options):
            x, found = self._before.run(None, {"states": states, "embedded": embedded}, self._options)
        return x, found

    def after(self, x: States, attended: States) -> tuple[States, States]:
        with translated(self._options):
            states, scores = self._after.run(None, {"x": x, "attended": attended}, self._options)
        return states, scores

    def close(self) -> None:
        self._fuse = self._before = self._after = None


class OnnxLayerProducts(OnnxProducts):
    """The products of an EAGLE-3 head; its layer continues from the state before the last norm."""

    _ends = "end", "scored"

    def _opened_fuse(self, manifest: HeadManifest, arrays: Mapping[str, Matrix], threads: int) -> Any:
        graph, read = _Graph(manifest.norm_eps), "features"
        if manifest.norms_features:
            graph.norm(read, arrays["feature_norm"], read := "normed")
        graph.product(read, arrays["fc"], "states")
        inputs, made = [("features", manifest.fused_size)], [("states", manifest.hidden_size)]
        return self._open(graph, inputs, made, threads)

    def _opened_before(self, manifest: HeadManifest, arrays: Mapping[str, Matrix], threads: int) -> Any:
        width, together = manifest.hidden_size, _together(arrays)
        graph = _Graph(manifest.norm_eps)
        graph.norm("states", arrays["state_norm"], "normed_states")
        graph.norm("embedded", arrays["embedding_norm"], "normed_embedded")
        graph.add("Concat", ["normed_embedded", "normed_states"], "pairs", axis=1)
        graph.product("pairs", together, "found")
        graph.add("Identity", ["normed_states" if manifest.norms_residual else "states"], "x")
        made = [("x", width), ("found", len(together))]
        return self._open(graph, [("states", width), ("embedded", width)], made, threads)


def _together(arrays: Mapping[str, Matrix]) -> Matrix:
    """Queries, keys and values as one matrix."""
    return np.concatenate([arrays[f"{name}_proj"] for name in "qkv"])


class _Graph:
    """Operators and weights of a graph whose values are all [n, width] in float32."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon
        self._nodes: list[Any] = []
        self._weights: list[Any] = []
        self.num_bytes = 0

    def add(self, kind: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> None:
        from onnx import helper

        self._nodes.append(helper.make_node(kind, list(inputs), [output], output, domain=domain, **attributes))

    def norm(self, value: str, weights: NDArray[np.float32], output: str) -> None:
        name = self._keep(f"{output}.weights", weights)
        self.add("SimplifiedLayerNormalization", [value, name], output, axis=-1, epsilon=self._epsilon, stash_type=1)

    def product(self, value: str, weights: NDArray[np.float32], output: str) -> None:
        """The product of `value` [n, K] with the rows of `weights` [N, K]."""
        count, width = weights.shape
        group = next((size for size in GROUPS if width % size == 0), None)
        if group is None:
            columns = self._keep(f"{output}.columns", np.ascontiguousarray(weights.T))
            self.add("MatMul", [value, columns], output)
            return
        codes, scales = quantise_rows(weights, group)
        names = [
            self._keep(f"{output}.codes", codes.reshape(count, width // group, group)),
            self._keep(f"{output}.scales", scales.reshape(-1)),
        ]
        sizes = {"K": width, "N": count, "bits": 8, "block_size": group, "accuracy_level": WHOLE_INPUTS}
        self.add("MatMulNBits", [value, *names], output, MICROSOFT, **sizes)

    def _keep(self, name: str, array: NDArray[Any]) -> str:
        from onnx import numpy_helper

        self._weights.append(numpy_helper.from_array(array, name))
        self.num_bytes += array.nbytes
        return name

    def serialised(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> bytes:
        from onnx import TensorProto, helper

        given, made = (
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name, width in values]
            for values in (inputs, outputs)
        )
        graph = helper.make_graph(self._nodes, "eagle", given, made, self._weights)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString())

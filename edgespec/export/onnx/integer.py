"""w8a8: matrix products in whole numbers, weights of 8 bits with a scale per output, inputs with a scale per row.

A row is scaled by its own largest value alone, and whole numbers add up to the same sum in every order: the bits of a
row depend neither on its neighbours nor on how many there are. A kernel for whole numbers also reads the weights once
for several rows where MatMulNBits reads its scales anew for each, so a pass of eight rows costs little more than one.
The output projection keeps groups of weights per scale (MatMulNBits), which are the more exact and serve as embedding.

LLM.int8 (arXiv:2208.07339) section 2.1 and SmoothQuant (arXiv:2211.10438) section 3 describe scales per row and output.
Works on the files of a float32 export, one tensor in memory at a time. What it does not know: who exported the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.engines.onnx.graph import head_of
from edgespec.errors import ModelFileError
from edgespec.export.onnx.datafile import DataWriter, Stored
from edgespec.export.onnx.graph import DATA, MODEL, read_graph, write_graph
from edgespec.export.onnx.tied import find_lookup, look_up_in_head, whole_blocks

LARGEST = 127  # codes are symmetric, so that no row needs a sum of its own
MIDDLE = 128  # of the unsigned codes of inputs; the kernels of x86 processors take those with signed weights
LEAST_SIDE = 32  # of a product worth the operators around it
COLUMNS = 4096  # quantised at once
MICROSOFT = "com.microsoft"
Progress = Callable[[int, int], None]
CONSTANTS = {
    "w8a8.last_axis": np.array([-1], np.int64),
    "w8a8.step": np.array(1 / LARGEST, np.float32),
    "w8a8.least_scale": np.array(np.finfo(np.float32).tiny, np.float32),  # for rows of zeros
    "w8a8.middle": np.array(MIDDLE, np.float32),
    "w8a8.zero_point": np.array(MIDDLE, np.uint8),
    "w8a8.one": np.array(1, np.float32),
}


def to_integer(folder: Path, group_size: int, *, is_tied: bool, progress: Progress | None = None) -> int:
    """Rewrite `model.onnx`, a float32 graph, and its data; returns how many products became products of whole numbers.

    `group_size` weights share a scale in the output projection. `is_tied`: embeddings are its rows. `progress` gets
    tensors (done, total). The folder must not be in use yet: data and graph are replaced one after the other. Raises
    ModelFileError for a graph without logits, or without a product that can be rewritten, and OSError.
    """
    model = read_graph(folder / MODEL)
    found = _Rewriting(model, folder, group_size)
    temporary = (folder / DATA).with_name(DATA + ".tmp")
    try:
        with temporary.open("wb") as file:
            found.run(DataWriter(file, DATA), is_tied, progress)
        if not found.num_products:
            raise ModelFileError(f"{folder / MODEL} has no matrix product with constant weights: nothing to quantise")
        temporary.replace(folder / DATA)
    finally:
        temporary.unlink(missing_ok=True)
    write_graph(model, folder / MODEL)
    return found.num_products


def quantise_columns(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes [K, N] and scales [N] of weights [K, N]; a column of zeros has the scale 1."""
    codes = np.empty(weights.shape, np.int8)
    scales = np.empty(weights.shape[1], np.float32)
    for start in range(0, weights.shape[1], COLUMNS):
        part = np.ascontiguousarray(weights[:, start : start + COLUMNS])
        largest = np.abs(part).max(axis=0)
        scale = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1)).astype(np.float32)
        codes[:, start : start + COLUMNS] = np.clip(np.rint(part / scale), -LARGEST, LARGEST)
        scales[start : start + COLUMNS] = scale
    return codes, scales


def quantise_groups(weights: NDArray[np.float32], size: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """MatMulNBits' codes [N, groups, size], 128 for zero, and scales [N, groups], of weights [K, N]."""
    inner, outer = weights.shape
    groups = -(-inner // size)
    codes = np.empty((outer, groups, size), np.uint8)
    scales = np.empty((outer, groups), np.float32)
    for start in range(0, outer, COLUMNS):
        part = np.zeros((min(COLUMNS, outer - start), groups * size), np.float32)
        part[:, :inner] = weights[:, start : start + COLUMNS].T
        blocks = part.reshape(-1, groups, size)
        largest = np.abs(blocks).max(axis=2)
        scale = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1)).astype(np.float32)
        codes[start : start + COLUMNS] = np.rint(blocks / scale[..., None]) + MIDDLE
        scales[start : start + COLUMNS] = scale
    return codes, scales


class _Rewriting:
    """One graph on its way; `num_products` so far."""

    def __init__(self, model: onnx.ModelProto, folder: Path, group_size: int) -> None:
        self.model, self.graph, self.group_size = model, model.graph, group_size
        self.stored = Stored(model.graph, folder)
        self._logits = str(head_of(model.graph, folder / MODEL).output[0])
        self.num_products = 0
        self._head_weight = ""
        self._nodes: list[onnx.NodeProto] = []
        self._made: dict[str, onnx.TensorProto] = {}
        self._quantised: dict[str, tuple[str, str]] = {}

    def run(self, data: DataWriter, is_tied: bool, progress: Progress | None) -> None:
        nodes = list(self.graph.node)
        for done, node in enumerate(nodes):
            weight = self._weight_of(node)
            if weight is None:
                self._nodes.append(node)
            elif node.output[0] == self._logits:
                self._head(node, weight, data)
            else:
                self._product(node, weight, data)
            if progress is not None:
                progress(done + 1, len(nodes))
        del self.graph.node[:]
        self.graph.node.extend(self._nodes)
        self._share_embedding(is_tied)
        self._take(data)

    def _share_embedding(self, is_tied: bool) -> None:
        """Look tokens up in the output projection where the embeddings are its rows."""
        lookup, table = find_lookup(self.graph), self._made.get("lm_head.weight_Q8")
        if lookup is None or table is None or not (is_tied or self.stored.same(lookup.input[0], self._head_weight)):
            return
        head = next(node for node in self.graph.node if node.output[0] == self._logits)
        if whole_blocks(head):
            view = look_up_in_head(self.graph, lookup, head, table)
            self._made[view.name] = view

    def _take(self, data: DataWriter) -> None:
        """Leave what is read: tensors made anew, and old ones with their bytes moved to the new file."""
        self.stored.drop_unused_transposes()
        read = {name for node in self.graph.node for name in node.input}
        kept = [tensor for tensor in self.graph.initializer if tensor.name in read]
        kept = [self.stored.moved(tensor, data) for tensor in kept]
        constants = [numpy_helper.from_array(value, name) for name, value in CONSTANTS.items() if name in read]
        del self.graph.initializer[:]
        self.graph.initializer.extend([*kept, *self._made.values(), *constants])
        if not any(entry.domain == MICROSOFT for entry in self.model.opset_import):
            self.model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))

    def _weight_of(self, node: onnx.NodeProto) -> NDArray[np.float32] | None:
        """The constant weights [K, N] of a product, where they are large enough."""
        if node.op_type != "MatMul":
            return None
        weight = self.stored.matrix(node.input[1])
        return weight if weight is not None and min(weight.shape) >= LEAST_SIDE else None

    def _product(self, node: onnx.NodeProto, weight: NDArray[np.float32], data: DataWriter) -> None:
        codes, scales = f"{node.input[1]}_w8", f"{node.input[1]}_scale"
        if codes not in self._made:
            for name, values in zip((codes, scales), quantise_columns(weight), strict=True):
                self._made[name] = data.add(name, values)
        rows, row_scales = self._quantise(node.input[0])
        name, whole = node.name or node.output[0], f"{node.output[0]}/w8a8"
        inputs = [rows, codes, "w8a8.one", scales, "w8a8.zero_point"]
        self._nodes += [
            helper.make_node("MatMulIntegerToFloat", inputs, [whole], f"{name}/w8a8", domain=MICROSOFT),
            helper.make_node("Mul", [whole, row_scales], list(node.output), f"{name}/w8a8/Scale"),
        ]
        self.num_products += 1

    def _quantise(self, value: str) -> tuple[str, str]:
        """Names of the codes [..., K] and scales [..., 1] of a product's input, made once however many read them."""
        if value in self._quantised:
            return self._quantised[value]
        name = f"{value}/w8a8"

        def step(kind: str, *inputs: str, **attributes: int) -> str:
            made = f"{name}/{kind}"
            self._nodes.append(helper.make_node(kind, list(inputs), [made], made, **attributes))
            return made

        largest = step("ReduceMax", step("Abs", value), "w8a8.last_axis", keepdims=1)
        scale = step("Max", step("Mul", largest, "w8a8.step"), "w8a8.least_scale")
        codes = step("Add", step("Round", step("Div", value, scale)), "w8a8.middle")
        self._quantised[value] = step("Cast", codes, to=TensorProto.UINT8), scale
        return self._quantised[value]

    def _head(self, node: onnx.NodeProto, weight: NDArray[np.float32], data: DataWriter) -> None:
        names = "lm_head.weight_Q8", "lm_head.scales"
        for name, values in zip(names, quantise_groups(weight, self.group_size), strict=True):
            self._made[name] = data.add(name, values)
        settings = {"K": weight.shape[0], "N": weight.shape[1], "bits": 8, "block_size": self.group_size}
        inputs, name = [node.input[0], *names], f"{node.name or node.output[0]}NBits"
        nbits = helper.make_node("MatMulNBits", inputs, list(node.output), name, domain=MICROSOFT, **settings)
        nbits.attribute.append(helper.make_attribute("accuracy_level", 4))
        self._nodes.append(nbits)
        self._head_weight = str(node.input[1])

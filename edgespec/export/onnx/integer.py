"""w8a8: matrix products in whole numbers, weights of 8 bits with a scale per output, inputs with a scale per row.

A row is scaled by its own largest value alone, and whole numbers add up to the same sum in every order: the bits of a
row depend neither on its neighbours nor on how many there are. A kernel for whole numbers also reads the weights once
for several rows where MatMulNBits reads its scales anew for each, so a pass of eight rows costs little more than one.
Embeddings become groups of 8 bits with a scale each: they are looked up, which reads rows, and not the columns that a
product reads, so one that is tied to the output projection is stored beside it.

LLM.int8 (arXiv:2208.07339) section 2.1 and SmoothQuant (arXiv:2211.10438) section 3 describe scales per row and output.
Works on the files of a float32 export, one tensor in memory at a time. What it does not know: who exported the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.engines.onnx.head import WHOLE_PRODUCT
from edgespec.errors import ModelFileError
from edgespec.export.onnx.datafile import DataWriter, Stored
from edgespec.export.onnx.graph import DATA, MODEL, read_graph, write_graph
from edgespec.export.onnx.tied import find_lookup, look_up_blocks

LARGEST = 127  # codes are symmetric, so that no row needs a sum of its own
MIDDLE = 128  # of the unsigned codes of inputs; the kernels of x86 processors take those with signed weights
SMALLER_GROUPS = (32, 16)  # for embeddings whose width is no multiple
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


def to_integer(folder: Path, group_size: int, progress: Progress | None = None) -> int:
    """Rewrite `model.onnx`, a float32 graph, and its data; returns how many products became products of whole numbers.

    `group_size` weights share a scale in the embeddings. `progress` gets operators (done, total). The folder must not
    be in use yet: data and graph are replaced one after the other. Raises ModelFileError for a graph without a product
    that can be rewritten and for weights that are no numbers, and OSError.
    """
    model = read_graph(folder / MODEL)
    temporary = (folder / DATA).with_name(DATA + ".tmp")
    try:
        with Stored(model.graph, folder) as stored, temporary.open("wb") as file:
            found = _Rewriting(model, stored, group_size)
            found.run(DataWriter(file, DATA), progress)
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
        scale = _scales(np.abs(part).max(axis=0))
        codes[:, start : start + COLUMNS] = np.clip(np.rint(part / scale), -LARGEST, LARGEST)
        scales[start : start + COLUMNS] = scale
    return codes, scales


def quantise_rows(rows: NDArray[np.float32], size: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes [N, K], 128 for zero, and scales [N, K / size] of rows [N, K]."""
    codes = np.empty(rows.shape, np.uint8)
    scales = np.empty((rows.shape[0], rows.shape[1] // size), np.float32)
    for start in range(0, len(rows), COLUMNS):
        part = np.ascontiguousarray(rows[start : start + COLUMNS])
        groups = part.reshape(len(part), -1, size)
        scale = _scales(np.abs(groups).max(axis=2))
        codes[start : start + COLUMNS] = (np.rint(groups / scale[..., None]) + MIDDLE).reshape(part.shape)
        scales[start : start + COLUMNS] = scale
    return codes, scales


def _scales(largest: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a code of 1 stands for where `largest` becomes the largest one; 1 for nothing but zeros."""
    if not np.isfinite(largest).all():
        raise ModelFileError("the checkpoint is damaged: it holds weights that are no finite numbers")
    return np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1)).astype(np.float32)


class _Rewriting:
    """One graph on its way; `num_products` so far."""

    def __init__(self, model: onnx.ModelProto, stored: Stored, group_size: int) -> None:
        self.model, self.graph, self.stored, self.group_size = model, model.graph, stored, group_size
        self._has_axes_as_input = any(o.domain in ("", "ai.onnx") and o.version >= 18 for o in model.opset_import)
        self.num_products = 0
        self._nodes: list[onnx.NodeProto] = []
        self._made: dict[str, onnx.TensorProto] = {}
        self._quantised: dict[str, tuple[str, str]] = {}

    def run(self, data: DataWriter, progress: Progress | None) -> None:
        nodes = list(self.graph.node)
        for done, node in enumerate(nodes):
            weight = self._weight_of(node)
            if weight is None:
                self._nodes.append(node)
            else:
                self._product(node, weight, data)
            if progress is not None:
                progress(done + 1, len(nodes))
        del self.graph.node[:]
        self.graph.node.extend(self._nodes)
        self._quantise_embedding(data)
        self._take(data)

    def _quantise_embedding(self, data: DataWriter) -> None:
        lookup = find_lookup(self.graph)
        table = None if lookup is None else self.stored.matrix(lookup.input[0])
        if lookup is None or table is None:
            return
        size = next((n for n in (self.group_size, *SMALLER_GROUPS) if table.shape[1] % n == 0), None)
        if size is not None:
            names = self._add(data, "embedding", *quantise_rows(table, size))
            look_up_blocks(self.graph, lookup, *names, bits=8, block_size=size)

    def _add(self, data: DataWriter, name: str, codes: NDArray[Any], scales: NDArray[np.float32]) -> tuple[str, str]:
        names = f"{name}_w8", f"{name}_scale"
        self._made |= {names[0]: data.add(names[0], codes), names[1]: data.add(names[1], scales)}
        return names

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
            self._add(data, node.input[1], *quantise_columns(weight))
        rows, row_scales = self._quantise(node.input[0])
        name, whole = node.name or node.output[0], f"{node.output[0]}/w8a8"
        inputs = [rows, codes, "w8a8.one", scales, "w8a8.zero_point"]
        self._nodes += [
            helper.make_node(WHOLE_PRODUCT, inputs, [whole], f"{name}/w8a8", domain=MICROSOFT),
            helper.make_node("Mul", [whole, row_scales], list(node.output), f"{name}/w8a8/Scale"),
        ]
        self.num_products += 1

    def _quantise(self, value: str) -> tuple[str, str]:
        """Names of the codes [..., K] and scales [..., 1] of a product's input, made once however many read them."""
        if value in self._quantised:
            return self._quantised[value]
        name = f"{value}/w8a8"

        def step(kind: str, *inputs: str, **attributes: int | list[int]) -> str:
            made = f"{name}/{kind}"
            self._nodes.append(helper.make_node(kind, list(inputs), [made], made, **attributes))
            return made

        if self._has_axes_as_input:
            largest = step("ReduceMax", step("Abs", value), "w8a8.last_axis", keepdims=1)
        else:
            largest = step("ReduceMax", step("Abs", value), axes=[-1], keepdims=1)
        scale = step("Max", step("Mul", largest, "w8a8.step"), "w8a8.least_scale")
        codes = step("Add", step("Round", step("Div", value, scale)), "w8a8.middle")
        self._quantised[value] = step("Cast", codes, to=TensorProto.UINT8), scale
        return self._quantised[value]

"""Rewrites a float32 graph as w8a8 (described in `edgespec.formats.onnx.w8a8`), one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgespec.errors import ModelFileError
from edgespec.export.onnx.datafile import Stored
from edgespec.export.onnx.graph import read_graph, write_graph
from edgespec.export.onnx.tied import find_lookup, look_up_blocks
from edgespec.formats.onnx import DATA, MICROSOFT, MODEL
from edgespec.formats.onnx.graph import DataWriter
from edgespec.formats.onnx.w8a8 import CONSTANTS, GROUP_SIZES, Products, quantise_columns, quantise_rows
from edgespec.platform.files import atomic_file

LEAST_SIDE = 32  # smaller products are not worth the additional operators
Progress = Callable[[int, int], None]


def to_integer(folder: Path, group_size: int, progress: Progress | None = None) -> int:
    """Rewrite `model.onnx`, a float32 graph, and its data file; returns the number of rewritten products.

    `group_size`: number of embedding weights that share a scale. `progress(done, total)` counts operators. The folder
    must not be in use, since data and graph are replaced one after the other. Raises ModelFileError if no product can
    be rewritten or weights are not finite, StateError if the disk is full.
    """
    model = read_graph(folder / MODEL)
    with atomic_file(folder / DATA) as temporary:
        with Stored(model.graph, folder) as stored, temporary.open("wb") as file:
            found = _Rewriting(model, stored, group_size)
            found.run(DataWriter(file, DATA), progress)
        if not found.num_products:
            raise ModelFileError(f"{folder / MODEL} has no matrix product with constant weights: nothing to quantise")
    write_graph(model, folder / MODEL)
    return found.num_products


class _Rewriting:
    """The rewriting of one graph. `num_products`: number of rewritten products."""

    def __init__(self, model: onnx.ModelProto, stored: Stored, group_size: int) -> None:
        self.model, self.graph, self.stored, self.group_size = model, model.graph, stored, group_size
        self.num_products = 0
        self._nodes: list[onnx.NodeProto] = []
        self._made: dict[str, onnx.TensorProto] = {}
        has_axes_as_input = any(o.domain in ("", "ai.onnx") and o.version >= 18 for o in model.opset_import)
        self._products = Products(self._nodes, has_axes_as_input=has_axes_as_input)

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
        size = next((n for n in (self.group_size, *GROUP_SIZES) if table.shape[1] % n == 0), None)
        if size is not None:
            names = self._add(data, "embedding", *quantise_rows(table, size))
            look_up_blocks(self.graph, lookup, *names, bits=8, block_size=size)

    def _add(self, data: DataWriter, name: str, codes: NDArray[Any], scales: NDArray[np.float32]) -> tuple[str, str]:
        names = f"{name}_w8", f"{name}_scale"
        self._made |= {names[0]: data.add(names[0], codes), names[1]: data.add(names[1], scales)}
        return names

    def _take(self, data: DataWriter) -> None:
        """Keep the tensors that are still used, moved to the new data file, and add the new ones."""
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
        """The constant weights [K, N] of a product; None for other nodes or small weights."""
        if node.op_type != "MatMul":
            return None
        weight = self.stored.matrix(node.input[1])
        return weight if weight is not None and min(weight.shape) >= LEAST_SIDE else None

    def _product(self, node: onnx.NodeProto, weight: NDArray[np.float32], data: DataWriter) -> None:
        codes, scales = f"{node.input[1]}_w8", f"{node.input[1]}_scale"
        if codes not in self._made:
            self._add(data, node.input[1], *quantise_columns(weight))
        self._products.add(node.name or node.output[0], node.input[0], (codes, scales), node.output)
        self.num_products += 1

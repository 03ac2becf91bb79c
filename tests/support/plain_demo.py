"""The demo target with the weights of its int8 export as floats, or in 4 bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgespec.export.onnx.optimum import save
from edgespec.formats.onnx.forms import quantise_blocks


def plain_demo(shipped: Path, folder: Path) -> Path:
    """The demo target with float32 weights, laid out as the builder writes a tied model."""
    shutil.copytree(shipped, folder)
    model = onnx.load(folder / "model.onnx")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            codes, scales = (stored.pop(name) for name in node.input[1:3])
            rows = (codes.astype(np.float32) - 128) * scales.reshape(*codes.shape[:2], 1)
            stored[f"{node.name}.weight"] = np.ascontiguousarray(rows.reshape(len(rows), -1).T)
            node.CopyFrom(
                helper.make_node("MatMul", [node.input[0], f"{node.name}.weight"], list(node.output), node.name)
            )
    head = next(node for node in model.graph.node if node.output[0] == "logits")
    lookup = next(node for node in model.graph.node if node.op_type == "GatherBlockQuantized")
    lookup.CopyFrom(helper.make_node("Gather", ["table", "input_ids"], list(lookup.output), "/embed/Gather"))
    model.graph.node.insert(0, helper.make_node("Transpose", [head.input[1]], ["table"], perm=[1, 0]))
    read = {name for node in model.graph.node for name in node.input}
    del model.graph.initializer[:]
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in stored.items() if name in read)
    save(model, folder)
    return folder / "model.onnx"


def four_bit_demo(shipped: Path, folder: Path) -> Path:
    """The demo target whose products read 4 bits; the embeddings keep 8."""
    shutil.copytree(shipped, folder)
    model = onnx.load(folder / "model.onnx")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            sizes = {each.name: each for each in node.attribute}
            codes, scales = (stored[name] for name in node.input[1:3])
            rows = (codes.astype(np.float32) - 128) * scales.reshape(*codes.shape[:2], 1)
            node.input[1:] = [f"{node.name}.codes", f"{node.name}.scales"]
            found = quantise_blocks(rows.reshape(len(rows), -1), 4, sizes["block_size"].i)
            stored |= dict(zip(node.input[1:], found, strict=True))
            sizes["bits"].i = 4
    read = {name for node in model.graph.node for name in node.input}
    del model.graph.initializer[:]
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in stored.items() if name in read)
    save(model, folder)
    return folder / "model.onnx"

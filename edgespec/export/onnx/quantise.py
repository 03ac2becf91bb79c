"""Group-wise quantisation of a graph's matrix products; weights are written to one data file. Runs in a child process.

`python -m edgespec.export.onnx.quantise ORDER` where ORDER is JSON: {output, quant, group_size}; quantises
`output/model.onnx` in place.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import onnx

from edgespec.engines.onnx.library import library
from edgespec.export.onnx.child import follow_parent
from edgespec.formats.onnx import DATA, MODEL


def quantise(model: onnx.ModelProto, quant: str, group_size: int) -> onnx.ModelProto:
    """Replace the matrix products of a graph in memory by MatMulNBits: symmetric groups, int8 arithmetic."""
    library()  # raises an error that names the missing extra
    tool = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
    bits = int(quant.removeprefix("int"))
    quantiser = tool.MatMulNBitsQuantizer(model, bits, group_size, is_symmetric=True, accuracy_level=4)
    quantiser.process()
    result: onnx.ModelProto = quantiser.model.model
    return result


def save(model: onnx.ModelProto, folder: Path) -> None:
    (folder / DATA).unlink(missing_ok=True)  # onnx would append to an existing file
    onnx.save_model(model, folder / MODEL, save_as_external_data=True, location=DATA, size_threshold=1024)


def main() -> None:
    follow_parent()
    order = json.loads(sys.argv[1])
    folder = Path(order["output"])
    save(quantise(onnx.load(folder / MODEL), order["quant"], order["group_size"]), folder)


if __name__ == "__main__":
    main()

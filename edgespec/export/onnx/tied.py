"""Stores tied embeddings of a quantised graph once: the lookup reads the rows of the output projection.

The model builder does this for 4 bits, but stores an 8-bit model's embeddings as float32 beside the quantised
projection, a third of a small model's file. GatherBlockQuantized can read the data of MatMulNBits: both store a row's
blocks one after another. The embeddings then have the projection's rounding, as in a GGUF Q8_0 file.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from edgespec.engines.onnx.head import attribute
from edgespec.errors import ModelFileError
from edgespec.export.onnx.graph import read_graph, write_graph
from edgespec.formats.onnx import DATA
from edgespec.platform.files import atomic_file

COPY_BYTES = 16 * 2**20


def share_embedding(folder: Path) -> bool:
    """Rewrite `model.onnx` and its data file so that the embedding lookup reads the quantised output projection.

    Only for a checkpoint with tied embeddings. Returns False, changing nothing, if the graph does not allow it. The
    folder must not be in use, since data and graph are replaced one after the other.
    """
    path = folder / "model.onnx"
    model = read_graph(path)
    lookup = find_lookup(model.graph)
    head = next((n for n in model.graph.node if n.op_type == "MatMulNBits" and "lm_head" in n.input[1]), None)
    if lookup is None or head is None or not _same_bytes_fit(head):
        return False
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    view = _view_of(weights[head.input[1]], head)
    model.graph.initializer.append(view)
    bits, size = attribute(head, "bits"), attribute(head, "block_size")
    look_up_blocks(model.graph, lookup, view.name, head.input[2], bits=bits, block_size=size)
    model.graph.initializer.remove(weights[lookup.input[0]])
    _compact(model, folder / DATA)
    write_graph(model, path)
    return True


def find_lookup(graph: onnx.GraphProto) -> onnx.NodeProto | None:
    """The embedding lookup; None if there is none."""
    return next((n for n in graph.node if n.op_type == "Gather" and n.input[1] == "input_ids"), None)


def _same_bytes_fit(head: onnx.NodeProto) -> bool:
    """Whether rows consist of whole blocks, without stored zero points."""
    whole = attribute(head, "K") % attribute(head, "block_size") == 0
    return whole and attribute(head, "bits") in (4, 8) and len(head.input) == 3


def _view_of(rows: onnx.TensorProto, head: onnx.NodeProto) -> onnx.TensorProto:
    """A second tensor over the same bytes [N, blocks, bytes of a block], with the shape [N, bytes of a row]."""
    view = onnx.TensorProto()
    view.CopyFrom(rows)
    view.name = f"model.embed_tokens.weight_Q{attribute(head, 'bits')}"
    view.dims[:] = [attribute(head, "N"), attribute(head, "K") * attribute(head, "bits") // 8]
    return view


def look_up_blocks(
    graph: onnx.GraphProto, lookup: onnx.NodeProto, rows: str, scales: str, *, bits: int, block_size: int
) -> None:
    """Make `lookup` read quantised `rows` [tokens, bytes]; `block_size` weights share one of `scales`."""
    shared = onnx.helper.make_node(
        "GatherBlockQuantized",
        [rows, "input_ids", scales],
        list(lookup.output),
        name=f"{lookup.name}BlockQuantized",
        domain="com.microsoft",
        bits=bits,
        block_size=block_size,
        gather_axis=0,
        quantize_axis=1,
    )
    place = list(graph.node).index(lookup)
    graph.node.remove(lookup)
    graph.node.insert(place, shared)


def _compact(model: onnx.ModelProto, data: Path) -> None:
    """Rewrite the data file without unused bytes; tensors that share bytes still share them."""
    moved: dict[tuple[int, int], int] = {}
    with atomic_file(data) as temporary, data.open("rb") as source, temporary.open("wb") as target:
        for tensor in model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            place = {entry.key: entry for entry in tensor.external_data}
            if place["location"].value != data.name:
                raise ModelFileError(f"tensor {tensor.name} is in {place['location'].value}, not in {data.name}")
            offset, length = int(place["offset"].value), int(place["length"].value)
            if (offset, length) not in moved:
                target.seek(-target.tell() % 4096, 1)  # aligned, so that ONNX Runtime can map it
                moved[offset, length] = target.tell()
                source.seek(offset)
                for start in range(0, length, COPY_BYTES):
                    target.write(source.read(min(COPY_BYTES, length - start)))
            place["offset"].value = str(moved[offset, length])

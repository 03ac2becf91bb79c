"""Cuts an early-exit draft out of a target's graph: its first layers, final norm and head.

The cut is found by the node names of onnxruntime-genai's model builder. Between two layers the hidden state is two
values, `residual` and `delta`, which the next layer's first norm adds; here the final norm does. The draft uses the
weights in the target's `model.onnx.data`. How a target and its exit share these layers: `engines.onnx.partition`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from edgespec.engines.onnx.partition import extract
from edgespec.errors import CapabilityError, ConfigError
from edgespec.export.onnx.graph import read_graph, write_graph
from edgespec.formats.onnx import MODEL

DRAFT = "draft.onnx"


def early_exit_onnx(folder: Path, layers: int) -> Path:
    """Write `draft.onnx` beside `model.onnx`: its first `layers` layers, final norm and head. Returns the path.

    The file contains only the graph; it uses the weights in `model.onnx.data`. Raises ConfigError unless `layers` is
    from 1 to one less than the depth, CapabilityError for a graph that the model builder did not write, ModelFileError
    for a file that is not a graph.
    """
    path = folder / MODEL
    model = read_graph(path)
    nodes = {node.name: node for node in model.graph.node}
    total = sum(value.name.startswith("present.") for value in model.graph.output) // 2
    if not 0 < layers < total:
        raise ConfigError(f"cannot cut {path} after layer {layers}: allowed are 1 to {total - 1}")
    entry = nodes.get(f"/model/layers.{layers}/input_layernorm/SkipLayerNorm")
    final = nodes.get(f"/model/layers.{total}/final_norm_layernorm/SkipLayerNorm")
    if entry is None or final is None:
        raise CapabilityError(
            f"{path} cannot be cut between layers: it was not written by onnxruntime-genai's model builder; "
            "export it again with --exporter builder"
        )
    last = list(final.input[:2])
    for node in model.graph.node:
        if "/final_norm_layernorm/" in node.name and list(node.input[:2]) == last:
            node.input[:] = [*entry.input[:2], *node.input[2:]]
    inputs = [value for value in model.graph.input if not value.name.startswith("past_key_values.")]
    outputs = [value for value in model.graph.output if value.name == "logits"]
    inputs += _caches(model.graph.input, layers)
    outputs += _caches(model.graph.output, layers)
    return write_graph(extract(model, "early-exit draft", inputs, outputs), folder / DRAFT)


def _caches(values: Sequence[onnx.ValueInfoProto], layers: int) -> list[onnx.ValueInfoProto]:
    """Values named past_key_values.N.* or present.N.* of the first `layers` layers."""
    return [v for v in values if (p := v.name.split("."))[-2:-1] and p[-2].isdigit() and int(p[-2]) < layers]

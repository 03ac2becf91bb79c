"""Cuts a target's graph between layers: an early-exit draft, or three parts that share the first layers.

Cuts are found by the node names of onnxruntime-genai's model builder. Between two layers the hidden state is two
values, `residual` and `delta`, which the next layer's first norm adds. Parts pass on both, so that they compute bit for
bit the same as the whole graph. All files use the weights in `model.onnx.data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from edgespec.errors import CapabilityError, ConfigError
from edgespec.export.onnx.graph import MODEL, extract, read_graph, write_graph

DRAFT, FIRST, REST, HEAD = "draft.onnx", "first.onnx", "rest.onnx", "head.onnx"
HIDDEN_IN = ("hidden_in.residual", "hidden_in.delta")
HIDDEN_OUT = ("hidden_out.residual", "hidden_out.delta")


@dataclass(frozen=True, slots=True)
class Parts:
    """`first`: embeddings and the first layers; `rest`: the other layers; `head`: final norm and logits.

    The outputs `hidden_out.residual` and `hidden_out.delta` of one part, both [batch, width, hidden], are the inputs
    `hidden_in.residual` and `hidden_in.delta` of the next. The early-exit draft is first, head; the target is first,
    rest, head.
    """

    first: Path
    rest: Path
    head: Path


def early_exit_onnx(folder: Path, layers: int) -> Path:
    """Write `draft.onnx` beside `model.onnx`: its first `layers` layers, final norm and head. Returns the path.

    The file contains only the graph; it uses the weights in `model.onnx.data`. Raises ConfigError unless `layers` is
    from 1 to one less than the depth, CapabilityError for a graph that the model builder did not write, ModelFileError
    for a file that is not a graph.
    """
    cut = _Cut(folder, layers)
    return write_graph(cut.draft(), folder / DRAFT)


def partition_onnx(folder: Path, layers: int) -> Parts:
    """Write `first.onnx`, `rest.onnx` and `head.onnx` beside `model.onnx`, cut after `layers` layers.

    Raises the errors of `early_exit_onnx`.
    """
    cut = _Cut(folder, layers)
    return Parts(
        write_graph(cut.first(), folder / FIRST),
        write_graph(cut.rest(), folder / REST),
        write_graph(cut.head(), folder / HEAD),
    )


class _Cut:
    """One graph and the layer after which it is cut."""

    def __init__(self, folder: Path, layers: int) -> None:
        self.path = folder / MODEL
        self.model = read_graph(self.path)
        nodes = {node.name: node for node in self.model.graph.node}
        self.total = sum(value.name.startswith("present.") for value in self.model.graph.output) // 2
        if not 0 < layers < self.total:
            raise ConfigError(f"cannot cut {self.path} after layer {layers}: allowed are 1 to {self.total - 1}")
        self.layers = layers
        entry = nodes.get(f"/model/layers.{layers}/input_layernorm/SkipLayerNorm")
        final = nodes.get(f"/model/layers.{self.total}/final_norm_layernorm/SkipLayerNorm")
        if entry is None or final is None:
            raise CapabilityError(
                f"{self.path} cannot be cut between layers: it was not written by onnxruntime-genai's model builder; "
                "export it again with --exporter builder"
            )
        self.entry = list(entry.input[:2])
        self.final = list(final.input[:2])

    def _caches(self, values: Sequence[onnx.ValueInfoProto], low: int, high: int) -> list[onnx.ValueInfoProto]:
        """Values named past_key_values.N.* or present.N.* of layers low <= N < high."""
        return [v for v in values if (p := v.name.split("."))[-2:-1] and p[-2].isdigit() and low <= int(p[-2]) < high]

    def _inputs(self, low: int, high: int) -> list[onnx.ValueInfoProto]:
        shared = [v for v in self.model.graph.input if not v.name.startswith("past_key_values.")]
        return shared + self._caches(self.model.graph.input, low, high)

    def _outputs(self, low: int, high: int) -> list[onnx.ValueInfoProto]:
        return self._caches(self.model.graph.output, low, high)

    def _hidden(self, names: Sequence[str]) -> list[onnx.ValueInfoProto]:
        """Value infos of the two values at a cut; their type is that of the cache."""
        kind = self._caches(self.model.graph.input, 0, 1)[0].type.tensor_type.elem_type
        shape = ["batch_size", "sequence_length", None]
        return [onnx.helper.make_tensor_value_info(name, kind, shape) for name in names]

    def _logits(self) -> onnx.ValueInfoProto:
        return next(value for value in self.model.graph.output if value.name == "logits")

    def draft(self) -> onnx.ModelProto:
        copy = _copy(self.model)
        for node in copy.graph.node:
            if "/final_norm_layernorm/" in node.name and list(node.input[:2]) == self.final:
                node.input[:] = [*self.entry, *node.input[2:]]
        outputs = [self._logits(), *self._outputs(0, self.layers)]
        return extract(copy, "early-exit draft", self._inputs(0, self.layers), outputs)

    def first(self) -> onnx.ModelProto:
        model = _renamed(self.model, self.entry, HIDDEN_OUT)
        outputs = [*self._hidden(HIDDEN_OUT), *self._outputs(0, self.layers)]
        return extract(model, "first layers", self._inputs(0, self.layers), outputs)

    def rest(self) -> onnx.ModelProto:
        model = _renamed(_renamed(self.model, self.entry, HIDDEN_IN), self.final, HIDDEN_OUT)
        inputs = [*self._inputs(self.layers, self.total), *self._hidden(HIDDEN_IN)]
        outputs = [*self._hidden(HIDDEN_OUT), *self._outputs(self.layers, self.total)]
        return extract(model, "other layers", inputs, outputs)

    def head(self) -> onnx.ModelProto:
        model = _renamed(self.model, self.final, HIDDEN_IN)
        return extract(model, "head", self._hidden(HIDDEN_IN), [self._logits()])


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _renamed(model: onnx.ModelProto, old: Sequence[str], new: Sequence[str]) -> onnx.ModelProto:
    """A copy with values renamed from `old` to `new`."""
    names = dict(zip(old, new, strict=True))
    copy = _copy(model)
    for node in copy.graph.node:
        node.input[:] = [names.get(value, value) for value in node.input]
        node.output[:] = [names.get(value, value) for value in node.output]
    return copy

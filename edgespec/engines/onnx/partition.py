"""Cuts a graph after some of its layers, so that a target can reuse what an early exit computed in them.

first: embeddings and the first layers; rest: the other layers; head: final norm and logits. first, rest, head make the
target; first, head the early exit. Between two layers the hidden state exists as two values, `residual` and `delta`,
which the next layer's first norm adds; parts pass on both, so that their results are bitwise those of the whole graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.engines.onnx.graph import PAST, CacheEntry, Graph, read_graph
from edgespec.engines.onnx.head import LOGITS, producers
from edgespec.engines.onnx.source import open_source
from edgespec.errors import CapabilityError, ConfigError, ModelFileError

HIDDEN_IN = ("edgespec.in.residual", "edgespec.in.delta")
HIDDEN_OUT = ("edgespec.out.residual", "edgespec.out.delta")


@dataclass(frozen=True, slots=True)
class Partition:
    """The three parts of one graph; `hidden_size` of a state, `element_type` as onnx numbers it."""

    first: Graph
    rest: Graph
    head: Graph
    hidden_size: int
    element_type: int


def partition(graph: Graph, path: Path, layers: int) -> Partition:
    """`graph`, as `read_graph` rewrote it, cut after layer `layers`.

    Raises ConfigError for a number of layers outside 1..all but one, CapabilityError for a graph that
    onnxruntime-genai's model builder did not write.
    """
    import onnx

    total = len(graph.cache) // 2
    model = onnx.ModelProto.FromString(graph.serialised)
    nodes = {node.name: node for node in model.graph.node}
    final = nodes.get(f"/model/layers.{total}/final_norm_layernorm/SkipLayerNorm")
    if graph.is_shared and final is not None and not 0 < layers < total:
        raise ConfigError(f"an exit after layer {layers} was asked for; {path} allows 1..{total - 1}")
    entry = nodes.get(f"/model/layers.{layers}/input_layernorm/SkipLayerNorm")
    if entry is None or final is None or not graph.is_shared:
        raise CapabilityError(
            f"{path} cannot be cut between layers: it was not made by onnxruntime-genai's model builder. Export it "
            "again with --exporter builder, or use another drafter"
        )
    cut, end = list(entry.input[:2]), list(final.input[:2])
    scale = next(tensor for tensor in model.graph.initializer if tensor.name == entry.input[2])
    kind = scale.data_type
    own = [value for value in model.graph.input if not value.name.startswith("past_key_values.")]
    logits = [value for value in model.graph.output if value.name == LOGITS]

    def part(name: str, low: int, high: int, taken: Sequence[str], given: Sequence[str]) -> Graph:
        """Layers low <= N < high: from the tokens or two `taken` values to the logits or two `given` ones."""
        renamed = _renamed(model, (*zip(taken, HIDDEN_IN, strict=False), *zip(given, HIDDEN_OUT, strict=False)))
        cache = tuple(entry for entry in graph.cache if low <= _layer(entry) < high)
        pasts, presents = {e.past for e in cache}, {e.present for e in cache}
        inputs = [*own, *(v for v in model.graph.input if v.name in pasts), *_states(HIDDEN_IN if taken else (), kind)]
        outputs = _states(HIDDEN_OUT, kind) if given else logits
        found = extract(renamed, name, inputs, [*outputs, *(v for v in model.graph.output if v.name in presents)])
        return replace(
            graph,
            serialised=found.SerializeToString(),
            cache=cache,
            vocabulary_size=0 if given else graph.vocabulary_size,
            inputs=frozenset(value.name for value in found.graph.input),
            outputs=frozenset(value.name for value in found.graph.output),
            hidden_size=None,
        )

    return Partition(
        part("first layers", 0, layers, (), cut),
        part("other layers", layers, total, cut, end),
        part("head", 0, 0, end, ()),
        int(scale.dims[0]),
        kind,
    )


def exit_layer_of(draft: Path, target: Path) -> int | None:
    """Layers of the early exit `draft` of `target`, a graph beside it over the same weights; None for another model.

    Raises ModelFileError.
    """
    if draft.parent != target.parent or draft == target:
        return None
    return len(read_graph(open_source(draft)).cache) // 2


def _layer(entry: CacheEntry) -> int:
    found = PAST.fullmatch(entry.past)
    assert found is not None
    return int(found[1])


def _states(names: Sequence[str], kind: int) -> list[Any]:
    from onnx import helper

    return [helper.make_tensor_value_info(name, kind, [1, "sequence_length", None]) for name in names]


def _renamed(model: Any, pairs: Sequence[tuple[str, str]]) -> Any:
    """A copy in which some values have other names."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    names = dict(pairs)
    for node in copy.graph.node:
        node.input[:] = [names.get(value, value) for value in node.input]
        node.output[:] = [names.get(value, value) for value in node.output]
    return copy


def extract(model: Any, name: str, inputs: Iterable[Any], outputs: Iterable[Any]) -> Any:
    """The part of a ModelProto that computes `outputs` from `inputs`, both ValueInfoProto, as a ModelProto.

    Weights keep their places in the data file. Raises ModelFileError when `outputs` need something that is neither
    computed nor among `inputs`.
    """
    import onnx

    made = producers(model.graph)
    inputs, outputs = list(inputs), list(outputs)
    known = {value.name for value in inputs}
    weights = {tensor.name for tensor in model.graph.initializer}
    wanted, used = [value.name for value in outputs], set[str]()
    kept: set[int] = set()
    while wanted:
        value = wanted.pop()
        if not value or value in known or value in used:
            continue
        used.add(value)
        if value in weights:
            continue
        if value not in made:
            raise ModelFileError(f"{name} needs {value!r}, which the graph does not compute")
        kept.add(id(made[value]))
        wanted.extend(made[value].input)
    graph = onnx.GraphProto(name=name)
    graph.node.extend(node for node in model.graph.node if id(node) in kept)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in used)
    read = {value for node in graph.node for value in node.input}
    graph.input.extend(value for value in inputs if value.name in read)
    graph.output.extend(outputs)
    part = onnx.ModelProto(ir_version=model.ir_version, producer_name=model.producer_name, graph=graph)
    part.opset_import.extend(model.opset_import)
    return part

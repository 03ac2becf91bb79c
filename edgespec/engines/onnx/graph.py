"""Reads an exported causal language model: its graph, rewritten for speculative decoding, and its properties.

A graph of onnxruntime-genai's builder computes the lengths for GroupQueryAttention from an attention mask; afterwards
the operator gets them from inputs of the graph, and its head runs on the rows whose logits are wanted. Weights stay in
their file, untouched. Graphs with a concatenated cache (Optimum) are left as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.engines.onnx.head import FLOAT, HIDDEN, LOGITS, attribute, give_hidden, keep_wanted_rows, shape_of
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.onnx.graph import IN_MEMORY, external_entry
from edgespec.formats.onnx.tiles import ATTENTION as OWN_ATTENTION
from edgespec.formats.onnx.tiles import DELTA_NET, DOMAIN, FEATURES, LAYOUT_VERSION, PRODUCT, SHORT_CONV
from edgespec.kernels.library import library_path, why_missing
from edgespec.kernels.memory import StateSizes

if TYPE_CHECKING:
    from edgespec.engines.onnx.source import Source

ATTENTION = "GroupQueryAttention"
MASK, POSITIONS = "attention_mask", "position_ids"
LENGTHS, TOTAL = "edgespec.lengths", "edgespec.total"  # inputs of our own; a graph may use the plain names inside
FLOAT16 = 10
_OWN_LAYERS = (OWN_ATTENTION, DELTA_NET, SHORT_CONV)
PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One KV tensor: names of its input and output, heads, head size, element type as onnx numbers it."""

    past: str
    present: str
    heads: int
    head_size: int | None
    element_type: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph ready for a session.

    `is_shared`: past and present may be one buffer; `max_positions`: rows of the rotary table, or None;
    `inputs`, `outputs`: names; `weight_bytes` of all initialisers;
    `is_half`: attention over a shared cache computes in float16; `has_tiles`: our kernels run it; `head_sizes`: of the
    heads of keys of all its layers, whose cache is then ours; `states`: of its layers that keep a running state;
    `cells`: of the caches that it was read for, 0 for any; `feature_size`: of what a draft head reads for a row.
    """

    serialised: bytes
    cache: tuple[CacheEntry, ...]
    vocabulary_size: int
    is_shared: bool
    max_positions: int | None
    inputs: frozenset[str]
    outputs: frozenset[str]
    hidden_size: int | None
    weight_bytes: int
    is_half: bool
    has_tiles: bool = False
    head_sizes: tuple[int, ...] = ()
    states: tuple[StateSizes, ...] = ()
    cells: int = 0
    feature_size: int = 0


def read_graph(
    source: Source,
    cells: int = 0,
    *,
    hidden_states: bool = False,
    state_layers: tuple[int, ...] = (),
) -> Graph:
    """The graph of an exported causal language model.

    `cells`: the capacity of the caches. `hidden_states`: make the input of the head an output, too, and before it the
    inputs of `state_layers`. Raises ModelNotFound, ModelFileError for a file that is not such a graph, CapabilityError
    without `onnx` or the kernels that the graph needs, or for layers it lacks.
    """
    model, path = source.graph(cells), source.path
    graph = model.graph
    has_tiles = _has_tiles(graph, path)
    if LOGITS not in {value.name for value in graph.output} & {name for node in graph.node for name in node.output}:
        raise ModelFileError(f"{path} is not a causal language model: it has no output 'logits'. Export it again")
    attention = [node for node in graph.node if node.op_type == ATTENTION]
    is_half = any(value.type.tensor_type.elem_type == FLOAT16 for value in graph.input if PAST.fullmatch(value.name))
    layers_of_ours = [node for node in graph.node if node.op_type in _OWN_LAYERS and node.domain == DOMAIN]
    own = [node for node in layers_of_ours if node.op_type == OWN_ATTENTION]
    cache = () if own else _cache_entries(graph, path)
    if hidden_states:
        layers = [_attention_of(layers_of_ours, attention, layer, path) for layer in state_layers]
        give_hidden(graph, path, layers)
    if attention:
        _rewrite_attention(graph, attention)
        keep_wanted_rows(graph, path)
        _widen_logits(graph)
        drop_dead(graph)
    if own:
        keep_wanted_rows(graph, path)
    max_positions = source.max_positions or _rotary_rows(graph, attention or own, path)
    widths = {value.name: (shape_of(value) or [""])[-1] for value in graph.output}
    vocabulary_size, hidden_size = widths.get(LOGITS), widths.get(HIDDEN)
    if not isinstance(vocabulary_size, int):
        raise ModelFileError(f"{path} is not a causal language model: it has no output 'logits' of known width")
    return Graph(
        serialised=model.SerializeToString(),
        cache=cache,
        vocabulary_size=vocabulary_size,
        is_shared=bool(attention),
        max_positions=max_positions,
        inputs=frozenset(value.name for value in graph.input),
        outputs=frozenset(widths),
        hidden_size=hidden_size if isinstance(hidden_size, int) else None,
        weight_bytes=weight_bytes(graph),
        is_half=is_half,
        has_tiles=has_tiles,
        head_sizes=_head_sizes(own),
        states=_state_sizes(graph, layers_of_ours),
        cells=cells,
        feature_size=next((int(shape_of(value)[-1]) for value in graph.input if value.name == FEATURES), 0),
    )


def _state_sizes(graph: Any, layers: list[Any]) -> tuple[StateSizes, ...]:
    """Of the layers with a running state, in their order."""
    kernels = {DELTA_NET: 2, SHORT_CONV: 1}  # which input a convolution's is
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    heads = ("key_heads", "value_heads", "size")
    return tuple(
        StateSizes(*reversed(shapes[node.input[kernels[node.op_type]]]), *(attribute(node, name) for name in heads))
        for node in layers
        if node.op_type in kernels
    )


def _head_sizes(own: list[Any]) -> tuple[int, ...]:
    """Of the heads of keys in the order of the cache. Layers that share them name the same ones."""
    sizes = {
        attribute(node, "first_head") + head: attribute(node, "head_size")
        for node in own
        for head in range(attribute(node, "kv_heads"))
    }
    return tuple(sizes[head] for head in sorted(sizes))


def _has_tiles(graph: Any, path: Path) -> bool:
    """Whether our kernels multiply. Raises CapabilityError without them, ModelFileError for tiles of another layout."""
    layouts = {attribute(node, "layout") for node in graph.node if node.op_type == PRODUCT}
    if layouts and (missing := why_missing() if library_path() is None else ""):
        raise CapabilityError(
            f"{path} runs on edgespec's own kernels, which this installation lacks: {missing}. Or export the model as "
            "int8, which needs none"
        )
    if other := layouts - {LAYOUT_VERSION}:
        raise ModelFileError(
            f"{path} has its weights in tiles of layout {max(other)}, these kernels read layout {LAYOUT_VERSION}: "
            "export it again"
        )
    return bool(layouts)


def _attention_of(own: list[Any], attention: list[Any], layer: int, path: Path) -> Any:
    if layer < len(own):
        return own[layer]
    for node in attention:
        match = PAST.fullmatch(node.input[3])
        if match and int(match[1]) == layer:
            return node
    reason = "its attention is not GroupQueryAttention: export it again"
    if attention or own:
        reason = f"it has {len(attention or own)} layers: give heads that were made for this model"
    raise CapabilityError(f"the heads read the input of layer {layer} of {path}, but {reason}")


def _cache_entries(graph: Any, path: Path) -> tuple[CacheEntry, ...]:
    found = []
    for value in graph.input:
        if match := PAST.fullmatch(value.name):
            shape = shape_of(value)
            if len(shape) != 4 or not isinstance(shape[1], int) or shape[1] < 1:
                raise ModelFileError(
                    f"{path} is damaged: the shape of {value.name!r} is {shape}, (batch, heads, length, head size) "
                    "with a known number of heads is needed. Export it again"
                )
            size = shape[3] if isinstance(shape[3], int) and shape[3] else None
            present = f"present.{match[1]}.{match[2]}"
            found.append(CacheEntry(value.name, present, int(shape[1]), size, value.type.tensor_type.elem_type))
    names = {value.name for value in graph.output}
    if not found or not {entry.present for entry in found} <= names:
        raise ModelFileError(
            f"{path} has no KV cache (inputs past_key_values.N.key, outputs present.N.key): export it with one, as "
            "edgespec export does"
        )
    return tuple(found)


def _rotary_rows(graph: Any, attention: list[Any], path: Path) -> int | None:
    """Positions in the rotary tables; beyond them the operator would read out of bounds."""
    first = 5 if any(node.domain == DOMAIN for node in attention) else 7
    tables = {name for node in attention for name in node.input[first : first + 2] if name}
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer if tensor.name in tables}
    for name, shape in shapes.items():
        if len(shape) != 2 or min(shape) < 1 or len(set(shapes.values())) > 1:
            raise ModelFileError(
                f"{path} is damaged: its rotary table {name!r} has the shape {shape}, tables of one shape (positions, "
                "half a head) are needed. Export it again"
            )
    return min((shape[0] for shape in shapes.values()), default=None)


def _rewrite_attention(graph: Any, attention: list[Any]) -> None:
    """Feed lengths to every attention operator from inputs of the graph.

    A row then attends to all cells before it, and its position is its cell, which the operator counts itself.
    """
    from onnx import TensorProto, helper

    for node in attention:
        inputs = ["" if place in (9, 10) else name for place, name in enumerate(node.input)]  # positions, a bias
        inputs += [""] * (7 - len(inputs))
        inputs[5], inputs[6] = LENGTHS, TOTAL
        while not inputs[-1]:
            inputs.pop()
        node.input[:] = inputs
    for name, shape in ((LENGTHS, ["batch_size"]), (TOTAL, [])):
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT32, shape))


def _widen_logits(graph: Any) -> None:
    """Give logits of half precision as float32."""
    from onnx import helper

    value = next(value for value in graph.output if value.name == LOGITS)
    if value.type.tensor_type.elem_type != FLOAT16:
        return
    narrow = f"{LOGITS}.float16"
    for node in graph.node:
        node.output[:] = [narrow if name == LOGITS else name for name in node.output]
    graph.node.append(helper.make_node("Cast", [narrow], [LOGITS], to=FLOAT, name="widen_logits"))
    value.type.tensor_type.elem_type = FLOAT


def drop_dead(graph: Any) -> None:
    """Remove operators, weights and inputs that no output needs, such as those that counted the attention mask."""
    wanted = {value.name for value in graph.output}
    for place in reversed(range(len(graph.node))):  # each after those whose results it reads
        node = graph.node[place]
        if wanted.isdisjoint(node.output):
            del graph.node[place]
        else:
            wanted.update(filter(None, node.input))  # what is optional has no name
    for values in (graph.initializer, graph.input):
        for place in reversed(range(len(values))):
            if values[place].name not in wanted:
                del values[place]


def check_weight_files(graph: Any, path: Path) -> None:
    """Raise ModelFileError for an external weight outside the graph's own folder. ONNX Runtime checks the sizes."""
    for tensor in graph.initializer:
        name = external_entry(tensor).get("location", IN_MEMORY)
        if name != IN_MEMORY and Path(name).name != name:
            raise ModelFileError(f"{path} names a weight file outside its own folder: {name!r}. Export it again")


def weight_bytes(graph: Any) -> int:
    return sum(map(tensor_bytes, graph.initializer))


def tensor_bytes(tensor: Any) -> int:
    """Bytes of one weight, in the graph or in a file beside it."""
    entry = external_entry(tensor)
    if not entry:
        return int(tensor.ByteSize())
    length = entry.get("length", "0")
    return int(length) if length.isdecimal() and len(length) < 20 else 0  # loading it says what is wrong

"""Reads an exported causal language model: its graph, rewritten for speculative decoding, and its properties.

A graph of onnxruntime-genai's builder computes the lengths for GroupQueryAttention from an attention mask; afterwards
the operator gets them from inputs of the graph, and its head runs on the rows whose logits are wanted. Weights stay in
their file, untouched. Graphs with a concatenated cache (Optimum) are left as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.onnx.graph import IN_MEMORY, external_entry
from edgespec.formats.onnx.tiles import ATTENTION as OWN_ATTENTION
from edgespec.formats.onnx.tiles import DELTA_NET, DOMAIN, FEATURES, LAYOUT_VERSION, MAMBA, NORM, PRODUCT, SHORT_CONV
from edgespec.kernels.interface import StateSizes
from edgespec.kernels.library import library_path, why_missing

if TYPE_CHECKING:
    from edgespec.engines.onnx.source import GraphSource

ATTENTION = "GroupQueryAttention"
MASK, POSITIONS = "attention_mask", "position_ids"
LENGTHS, TOTAL = "edgespec.lengths", "edgespec.total"  # inputs of our own; a graph may use the plain names inside
FLOAT, FLOAT16 = 1, 10
LOGITS, HIDDEN, OUTPUT_ROWS = "logits", "hidden_states", "edgespec.output_rows"
UNARY_AFTER_HEAD = frozenset({"Cast", "Div", "Mul", "Tanh", "Where", "Add"})
HEADS = frozenset({"MatMul", "MatMulNBits", "Gemm", PRODUCT})  # those whose first input is the hidden state
HALF_ONLY = frozenset({"cuda"})
_READ_BY_ATTENTION = (0, 1, 2, 7, 8)  # query, key and value, or all in the first; cosines and sines
ELEMENTS: dict[int, type[np.float32 | np.float16]] = {FLOAT: np.float32, FLOAT16: np.float16}
_OWN_LAYERS = (OWN_ATTENTION, DELTA_NET, MAMBA, SHORT_CONV)
PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One KV tensor: names of its input and output, heads, head size, type of its numbers."""

    past: str
    present: str
    heads: int
    head_size: int | None
    dtype: type[np.float32 | np.float16]


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph ready for a session.

    `is_shared`: past and present may be one buffer; `max_positions`: rows of the rotary table, or None;
    `inputs`: names; `weight_bytes` of all initialisers; `is_half`: attention over a shared cache computes in float16;
    `head_sizes`: of the heads of keys of all its layers, where our kernels run it, whose cache is then ours; `states`:
    of its layers that keep a running state; `feature_size`: of what a draft head reads for a row.
    """

    serialised: bytes
    cache: tuple[CacheEntry, ...]
    vocabulary_size: int
    is_shared: bool
    max_positions: int | None
    inputs: frozenset[str]
    hidden_size: int | None
    weight_bytes: int
    is_half: bool
    head_sizes: tuple[int, ...] = ()
    states: tuple[StateSizes, ...] = ()
    feature_size: int = 0


def read_graph(
    source: GraphSource,
    cells: int = 0,
    *,
    half: bool = False,
    hidden_states: bool = False,
    state_layers: tuple[int, ...] = (),
) -> Graph:
    """The graph of an exported causal language model.

    `cells`: the capacity of the caches. `half`: with GroupQueryAttention in float16, for a provider of `HALF_ONLY`.
    `hidden_states`: make the input of the head an output, too, and before it the
    inputs of `state_layers`. Raises ModelNotFound, ModelFileError for a file that is not such a graph, CapabilityError
    without `onnx` or the kernels that the graph needs, or for layers it lacks.
    """
    model, path = source.graph(cells), source.path
    graph = model.graph
    _check_layout(graph, path)
    if LOGITS not in {value.name for value in graph.output} & {name for node in graph.node for name in node.output}:
        raise ModelFileError(f"{path} is not a causal language model: it has no output 'logits'. Export it again")
    is_half = any(value.type.tensor_type.elem_type == FLOAT16 for value in graph.input if PAST.fullmatch(value.name))
    if half and not is_half:
        is_half = _cast_attention(graph)
    attention = [node for node in graph.node if node.op_type == ATTENTION]
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
        keep_wanted_rows(graph, path, None if hidden_states else layers_of_ours[-1])
    max_positions = source.max_positions or _rotary_rows(graph, attention or own)
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
        hidden_size=hidden_size if isinstance(hidden_size, int) else None,
        weight_bytes=weight_bytes(graph),
        is_half=is_half,
        head_sizes=_head_sizes(own),
        states=_state_sizes(graph, layers_of_ours),
        feature_size=next((int(shape_of(value)[-1]) for value in graph.input if value.name == FEATURES), 0),
    )


def _cast_attention(graph: Any) -> bool:
    """Cast what attention reads to float16 and its result to float32; whether there is any. The cache is float16 then.

    On CUDA GroupQueryAttention has kernels for float16 and bfloat16 only (onnxruntime/docs/OperatorKernels.md, of 1.2x;
    contrib_ops/cuda/bert/group_query_attention.cc). Everything else stays as it was exported.
    """
    from onnx import helper

    nodes: list[Any] = []
    cached: set[str] = set()
    halves: dict[str, str] = {}  # layers share their tables
    for node in graph.node:
        if node.op_type != ATTENTION:
            nodes.append(node)
            continue
        cached.update((*node.input[3:5], *node.output[1:3]))
        for place in _READ_BY_ATTENTION:
            value = node.input[place] if place < len(node.input) else ""
            if value and value not in halves:
                halves[value] = f"{value}.float16"
                nodes.append(helper.make_node("Cast", [value], [halves[value]], to=FLOAT16, name=halves[value]))
            if value:
                node.input[place] = halves[value]
        result, node.output[0] = node.output[0], f"{node.output[0]}.float16"
        widened = helper.make_node("Cast", [node.output[0]], [result], to=FLOAT, name=f"{result}.float32")
        nodes += [node, widened]
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]  # of what clearing would free
    del graph.node[:]
    graph.node.extend(copies)
    for value in (*graph.input, *graph.output):
        kind = value.type.tensor_type
        if value.name in cached and kind.elem_type == FLOAT:
            kind.elem_type = FLOAT16
    return bool(cached)


def _state_sizes(graph: Any, layers: list[Any]) -> tuple[StateSizes, ...]:
    """Of the layers with a running state, in their order."""
    kernels = {DELTA_NET: 2, MAMBA: 2, SHORT_CONV: 1}  # which input a convolution's is
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    heads = ("key_heads", "value_heads", "size", "value_size")
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


def _check_layout(graph: Any, path: Path) -> None:
    """Raises CapabilityError without the kernels that multiply, ModelFileError for tiles of another layout."""
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
            if (element := value.type.tensor_type.elem_type) not in ELEMENTS:
                raise CapabilityError(f"a KV cache of onnx element type {element} is not supported; use float32")
            size = shape[3] if isinstance(shape[3], int) and shape[3] else None
            present = f"present.{match[1]}.{match[2]}"
            found.append(CacheEntry(value.name, present, shape[1], size, ELEMENTS[element]))
    names = {value.name for value in graph.output}
    if not found or not {entry.present for entry in found} <= names:
        raise ModelFileError(
            f"{path} has no KV cache (inputs past_key_values.N.key, outputs present.N.key): export it with one, as "
            "edgespec export does"
        )
    return tuple(found)


def _rotary_rows(graph: Any, attention: list[Any]) -> int | None:
    """Positions in the rotary tables; beyond them the operator would read out of bounds."""
    first = 5 if any(node.domain == DOMAIN for node in attention) else 7
    tables = {name for node in attention for name in node.input[first : first + 2] if name}
    return min((int(tensor.dims[0]) for tensor in graph.initializer if tensor.name in tables), default=None)


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
    """Raise ModelFileError for an external weight outside the graph's own folder, where ONNX Runtime reads nothing.

    That checks the sizes.
    """
    for tensor in graph.initializer:
        name = external_entry(tensor).get("location", IN_MEMORY)
        if name != IN_MEMORY and Path(name).name != name:
            raise ModelFileError(f"{path} names a weight file outside its own folder: {name!r}. Export it again")
        if (path.parent / name).is_symlink():
            raise ModelFileError(f"{path.parent / name} is a link: use edgespec pull, or copy the folder without links")


def weight_bytes(graph: Any) -> int:
    return sum(map(tensor_bytes, graph.initializer))


def tensor_bytes(tensor: Any) -> int:
    """Bytes of one weight, in the graph or in a file beside it."""
    entry = external_entry(tensor)
    if not entry:
        return int(tensor.ByteSize())
    length = entry.get("length", "0")
    return int(length) if length.isdecimal() and len(length) < 20 else 0  # loading it says what is wrong


def bytes_per_token(graph: Graph, head_size: int) -> int:
    return sum(entry.heads * head_size * np.dtype(entry.dtype).itemsize for entry in graph.cache)


# -- the output projection


def producers(graph: Any) -> dict[str, Any]:
    """The node that makes each value of a GraphProto."""
    return {output: node for node in graph.node for output in node.output if output}


def attribute(node: Any, name: str, default: int = 0) -> int:
    """An integer attribute of a node, or `default`."""
    return next((int(item.i) for item in node.attribute if item.name == name), default)


def shape_of(value: Any) -> list[int | str]:
    """Dimensions of a ValueInfoProto: numbers where they are fixed, names elsewhere."""
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def head_of(graph: Any, path: Path) -> Any:
    """The operator that turns hidden states into logits. Raises ModelFileError for one of an unknown kind."""
    made = producers(graph)
    head = made[LOGITS]
    while head.op_type in UNARY_AFTER_HEAD:
        value = head.input[0]
        if value not in made:
            break
        head = made[value]
    if head.op_type not in HEADS:
        raise ModelFileError(f"{path} has a head of an unknown kind ({head.op_type} {head.name!r}): export it again")
    return head


def give_hidden(graph: Any, path: Path, attention: Sequence[Any] = ()) -> None:
    """Make the input of the head an output of the graph, in float32, with the inputs of some layers before it.

    `attention`: the attention operators of these layers. Raises CapabilityError for an unknown width or structure.
    """
    from onnx import helper

    if any(value.name == HIDDEN for value in graph.output):
        if attention:
            raise CapabilityError(f"{path} gives its last hidden states only: export it without --hidden-states")
        return
    head = head_of(graph, path)
    rows = head.input[0]
    widths: list[int | str] = [attribute(head, "K", 0)]
    widths += [int(tensor.dims[0]) for tensor in graph.initializer if tensor.name == head.input[1]]
    widths += [shape[-1] for v in graph.value_info if v.name == rows and (shape := shape_of(v))]
    width = next((width for width in widths if isinstance(width, int) and width > 0), None)
    if width is None:
        raise CapabilityError(f"{path} does not contain the width of its hidden states: export it again")
    states = [*(_layer_input(graph, node, path) for node in attention), rows]
    names = [f"edgespec.state.{place}" for place in range(len(states))]
    for state, name in zip(states, names, strict=True):
        graph.node.append(helper.make_node("Cast", [state], [name], to=FLOAT, name=name))
    graph.node.append(helper.make_node("Concat", names, [HIDDEN], axis=-1, name="give_hidden_states"))
    shape = [1, "sequence_length", width * len(states)]
    graph.output.append(helper.make_tensor_value_info(HIDDEN, FLOAT, shape))


def _layer_input(graph: Any, attention: Any, path: Path) -> str:
    """The value that the layer of an attention operator adds to. Raises CapabilityError where it is not found.

    It is what the norm before the projections reads; a norm that also adds reads it in two parts.
    """
    from onnx import helper

    made = producers(graph)
    # Values, which have no norm of their own; our own operators read them together with the others.
    node = made.get(attention.input[0] if attention.domain == DOMAIN else attention.input[2] or attention.input[0])
    while node is not None and not node.op_type.endswith("LayerNormalization"):
        before = made.get(node.input[0]) if node.input else None
        if node.op_type == NORM and (before is None or before.op_type != PRODUCT):  # not of all queries at once
            break
        node = before
    if node is None:
        raise CapabilityError(f"{path}: heads cannot read the layer of {attention.name!r}, it has no norm before it")
    if node.op_type == NORM:
        return str(node.output[1] if len(node.output) > 1 else node.input[0])
    if not node.op_type.startswith("Skip"):
        return str(node.input[0])
    name = f"{attention.name}/layer_input"
    graph.node.append(helper.make_node("Add", list(node.input[:2]), [name], name=name))
    return name


def keep_wanted_rows(graph: Any, path: Path, last_layer: Any = None) -> None:
    """Limit what follows the caches to the rows whose logits are wanted: the head is much of a narrow pass.

    `last_layer`: the last operator that writes a cache. Behind it all rows of a prompt but one are of no use.
    """
    from onnx import TensorProto, helper

    head = head_of(graph, path)
    place = next(i for i, node in enumerate(graph.node) if node.output[0] == head.output[0])
    kept, reading = [head.input[0]], [head]
    if last_layer is not None:
        behind = list(graph.node).index(last_layer) + 1
        known = {name for node in graph.node[:behind] for name in node.output} | {value.name for value in graph.input}
        read = {name for node in graph.node[behind:] for name in node.input} & known
        with suppress(CapabilityError):  # where the layer's input is not found
            if read <= {last_layer.output[0], _layer_input(graph, last_layer, path)}:
                place, kept, reading = behind, sorted(read), graph.node[behind:]
    for node in reading:
        for at, name in enumerate(node.input):
            if name in kept:
                node.input[at] = f"{name}/wanted_rows"
    for name in kept:
        gather = helper.make_node("Gather", [name, OUTPUT_ROWS], [f"{name}/wanted_rows"], axis=1)
        graph.node.insert(place, gather)
    graph.input.append(helper.make_tensor_value_info(OUTPUT_ROWS, TensorProto.INT64, ["num_outputs"]))

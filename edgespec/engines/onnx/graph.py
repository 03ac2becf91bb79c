"""Reads an exported graph and rewrites it for speculative decoding; the weights stay in their file, untouched.

A graph of onnxruntime-genai's builder tells GroupQueryAttention where its rows stand by counting ones in an attention
mask. Here the operator gets these numbers from us, and with them explicit positions and an attention bias, so that the
rows of a tree can see their own ancestors only. The head is run on the rows whose logits somebody wants.
Graphs with a concatenated cache (Optimum) are left as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.onnx.head import FLOAT, HIDDEN, LOGITS, give_hidden, keep_wanted_rows, shape_of
from edgespec.errors import CapabilityError, ModelFileError, ModelNotFound
from edgespec.formats.onnx.tensors import external_entry, read_tensor
from edgespec.installation import install_command

ATTENTION = "GroupQueryAttention"
NUM_ATTENTION_INPUTS = 11
# Inputs of our own; an exported graph may use the plain names inside.
LENGTHS, TOTAL, BIAS = "edgespec.lengths", "edgespec.total", "edgespec.bias"
POSITIONS = "position_ids"
FLOAT16 = 10
MASK = "attention_mask"
PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
CacheScales = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One KV tensor: names of its input and output, [heads, head size], element type by onnx's number."""

    past: str
    present: str
    heads: int
    head_size: int | None
    element_type: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph ready for a session.

    `is_shared`: past and present may be one buffer; `max_positions`: rows of the rotary table, or None;
    `window`: the smallest sliding window, or None; `inputs`, `outputs`: names; `weight_bytes` of all initialisers.
    """

    serialised: bytes
    cache: tuple[CacheEntry, ...]
    vocabulary_size: int
    is_shared: bool
    max_positions: int | None
    window: int | None
    inputs: frozenset[str]
    outputs: frozenset[str]
    hidden_size: int | None
    weight_bytes: int


def read_graph(
    path: Path, cache_scales: CacheScales | None = None, cells: int = 0, *, hidden_states: bool = False
) -> Graph:
    """The graph of an exported causal language model.

    `cache_scales` by input name, [heads, head size] each: keys and values are kept as int8 times these. `cells` of
    the caches that it will get. `hidden_states`: give what the head reads as an output, too. Raises ModelNotFound,
    ModelFileError for a file that is no such graph, CapabilityError without `onnx`.
    """
    model = _load(path)
    graph = model.graph
    if LOGITS not in {value.name for value in graph.output} & {name for node in graph.node for name in node.output}:
        raise ModelFileError(f"{path} is no causal language model: it has no output 'logits'. Export it again")
    attention = [node for node in graph.node if node.op_type == ATTENTION]
    is_half = any(value.type.tensor_type.elem_type == FLOAT16 for value in graph.input if PAST.fullmatch(value.name))
    if cache_scales is not None:
        _quantise_cache(graph, attention, cache_scales)
    cache = _cache_entries(graph, path)
    if hidden_states:
        give_hidden(graph, path)
    if attention:
        _rewrite_attention(graph, attention, is_half)
        keep_wanted_rows(graph, path)
        _widen_logits(graph)
        _drop_dead(graph)
    max_positions = _rotary_rows(graph, attention, path)
    if max_positions is not None and max_positions < cells:
        _lengthen_rotary(graph, attention, path, cells)
    widths = {value.name: (shape_of(value) or [""])[-1] for value in graph.output}
    vocabulary_size, hidden_size = widths.get(LOGITS), widths.get(HIDDEN)
    if not isinstance(vocabulary_size, int):
        raise ModelFileError(f"{path} is no causal language model: it has no output 'logits' of known width")
    return Graph(
        serialised=model.SerializeToString(),
        cache=cache,
        vocabulary_size=vocabulary_size,
        is_shared=bool(attention),
        max_positions=max_positions,
        window=min((w for node in attention if (w := _attribute(node, "local_window_size", -1)) > 0), default=None),
        inputs=frozenset(value.name for value in graph.input),
        outputs=frozenset(widths),
        hidden_size=hidden_size if isinstance(hidden_size, int) else None,
        weight_bytes=_weight_bytes(graph),
    )


def _load(path: Path) -> Any:
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as exc:
        raise CapabilityError(f"reading ONNX files needs {exc.name}: {install_command()}") from exc
    if not path.is_file():
        raise ModelNotFound(f"no file {str(path)!r}: give the model.onnx of an export")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as exc:
        raise ModelFileError(f"{path} is not an ONNX file that can be read: {exc}. Export it again") from exc
    if not model.graph.node:
        raise ModelFileError(f"{path} is not an ONNX model: it holds no operators. Export it again")
    _check_weight_files(model.graph, path)
    return model


def _check_weight_files(graph: Any, path: Path) -> None:
    """Every external weight must lie inside its file, which must lie beside the graph."""
    sizes: dict[str, int] = {}
    for tensor in graph.initializer:
        entry = external_entry(tensor)
        if "location" not in entry:
            continue
        name = entry["location"]
        if Path(name).name != name:
            raise ModelFileError(f"{path} names a weight file outside its own folder: {name!r}. Export it again")
        if name not in sizes:
            file = path.parent / name
            if not file.is_file():
                raise ModelFileError(f"{path} needs {name!r} beside it, which is missing. Copy it there")
            sizes[name] = file.stat().st_size
        offset, length = (
            _whole(entry.get(key, "0"), f"{key} of {tensor.name!r}", path) for key in ("offset", "length")
        )
        end = offset + length
        if end > sizes[name]:
            raise ModelFileError(f"{path.parent / name} has {sizes[name]} bytes and needs {end}: it is truncated")


def _whole(text: str, what: str, path: Path) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ModelFileError(
            f"{path} is damaged: the {what} is {text[:40]!r}, a whole number is needed. Export it again"
        )
    return int(text)


def _attribute(node: Any, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


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


def _rewrite_attention(graph: Any, attention: list[Any], is_half: bool) -> None:
    """Feed lengths, positions and bias to every attention operator from inputs of the graph."""
    from onnx import TensorProto, helper

    bias = BIAS
    if is_half:
        bias = f"{BIAS}.float16"
        graph.node.insert(0, helper.make_node("Cast", [BIAS], [bias], to=FLOAT16, name=bias))
    for node in attention:
        inputs = [*node.input, *[""] * (NUM_ATTENTION_INPUTS - len(node.input))]
        inputs[5], inputs[6], inputs[10] = LENGTHS, TOTAL, bias
        if _attribute(node, "do_rotary", 0):
            inputs[9] = POSITIONS
        del node.input[:]
        node.input.extend(inputs)
    known = {value.name for value in graph.input}
    wanted: list[tuple[str, int, list[Any]]] = [
        (LENGTHS, TensorProto.INT32, [1]),
        (TOTAL, TensorProto.INT32, []),
        (POSITIONS, TensorProto.INT64, [1, "sequence_length"]),
        (BIAS, TensorProto.FLOAT, [1, 1, "sequence_length", "all_length"]),
    ]
    graph.input.extend(helper.make_tensor_value_info(*entry) for entry in wanted if entry[0] not in known)


def _quantise_cache(graph: Any, attention: list[Any], scales: CacheScales) -> None:
    """Let every attention operator keep keys and values as int8, with a scale per channel."""
    from onnx import TensorProto, helper, numpy_helper

    for node in attention:
        inputs = [*node.input, *[""] * (NUM_ATTENTION_INPUTS + 3 - len(node.input))]
        for place, past, kind in ((12, node.input[3], "k"), (13, node.input[4], "v")):
            heads, size = scales[past].shape
            inputs[place] = f"{past}.scale"
            tensor = scales[past].astype(np.float32).reshape(1, heads, 1, size)
            graph.initializer.append(numpy_helper.from_array(tensor, inputs[place]))
            node.attribute.append(helper.make_attribute(f"{kind}_quant_type", "PER_CHANNEL"))
        node.attribute.append(helper.make_attribute("kv_cache_bit_width", 8))
        del node.input[:]
        node.input.extend(inputs)
    names = {node.input[i] for node in attention for i in (3, 4)} | {
        node.output[i] for node in attention for i in (1, 2)
    }
    for value in (*graph.input, *graph.output):
        if value.name in names:
            value.type.tensor_type.elem_type = TensorProto.INT8


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


def _drop_dead(graph: Any) -> None:
    """Remove what nothing uses any more: the operators that counted the attention mask, and the mask."""
    while True:
        used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
        dead = [node for node in graph.node if not any(name in used for name in node.output if name)]
        if not dead:
            break
        for node in dead:
            graph.node.remove(node)
    inputs = [value for value in graph.input if value.name in used]
    del graph.input[:]
    graph.input.extend(inputs)


def _rotary_rows(graph: Any, attention: list[Any], path: Path) -> int | None:
    """Positions that the rotary tables have; beyond them the operator would read foreign memory."""
    tables = {name for node in attention for name in node.input[7:9] if name}
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer if tensor.name in tables}
    for name, shape in shapes.items():
        if len(shape) != 2 or min(shape) < 1 or len(set(shapes.values())) > 1:
            raise ModelFileError(
                f"{path} is damaged: its rotary table {name!r} has the shape {shape}, tables of one shape (positions, "
                "half a head) are needed. Export it again"
            )
    return min((shape[0] for shape in shapes.values()), default=None)


def _lengthen_rotary(graph: Any, attention: list[Any], path: Path, cells: int) -> None:
    """Repeat the last row of the rotary tables: the operator wants one per cell, though positions end before."""
    from onnx import numpy_helper

    tables = {name for node in attention for name in node.input[7:9] if name}
    for tensor in graph.initializer:
        if tensor.name in tables:
            rows = read_tensor(tensor, path.parent)
            longer = np.concatenate((rows, np.repeat(rows[-1:], cells - len(rows), axis=0)))
            tensor.CopyFrom(numpy_helper.from_array(longer, tensor.name))


def _weight_bytes(graph: Any) -> int:
    total = 0
    for tensor in graph.initializer:
        entry = {item.key: item.value for item in tensor.external_data}
        total += int(entry.get("length", 0)) if tensor.data_location == 1 else tensor.ByteSize()
    return total

"""The output projection of an exported graph: finds it, limits it to chosen rows, makes its input an output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.onnx.tiles import DOMAIN, NORM, PRODUCT

FLOAT = 1
LOGITS, HIDDEN, OUTPUT_ROWS = "logits", "hidden_states", "edgespec.output_rows"
UNARY_AFTER_HEAD = frozenset({"Cast", "Div", "Mul", "Tanh", "Where", "Add"})
HEADS = frozenset({"MatMul", "MatMulNBits", "Gemm", PRODUCT})  # those whose first input is the hidden state


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
    while node is not None and not node.op_type.endswith("LayerNormalization") and node.op_type != NORM:
        node = made.get(node.input[0]) if node.input else None
    if node is None:
        raise CapabilityError(f"{path}: heads cannot read the layer of {attention.name!r}, it has no norm before it")
    if node.op_type == NORM:
        return str(node.output[1] if len(node.output) > 1 else node.input[0])
    if not node.op_type.startswith("Skip"):
        return str(node.input[0])
    name = f"{attention.name}/layer_input"
    graph.node.append(helper.make_node("Add", list(node.input[:2]), [name], name=name))
    return name


def keep_wanted_rows(graph: Any, path: Path) -> None:
    """Limit the head to the rows whose logits are wanted: it takes a large part of a narrow pass."""
    from onnx import TensorProto, helper

    head = head_of(graph, path)
    kept = helper.make_node("Gather", [head.input[0], OUTPUT_ROWS], ["wanted_rows"], axis=1, name="keep_wanted_rows")
    place = next(i for i, node in enumerate(graph.node) if node.output[0] == head.output[0])
    head.input[0] = "wanted_rows"
    graph.node.insert(place, kept)
    graph.input.append(helper.make_tensor_value_info(OUTPUT_ROWS, TensorProto.INT64, ["num_outputs"]))

"""A random one-layer language model in ONNX whose cache grows by concatenation, as Optimum exports it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, SIZE, WIDTH = 2, 16, 32


def write_concatenated_model(folder: Path, tokenizer_folder: Path, vocabulary_size: int, context: int = 512) -> Path:
    """model.onnx over the tokenizer of another model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder / name)
    config = {"model_type": "tiny", "hidden_size": WIDTH, "num_attention_heads": HEADS}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    model = helper.make_model(_graph(vocabulary_size, context), opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    path = folder / "model.onnx"
    onnx.save(model, str(path))
    return path


def _graph(vocabulary_size: int, context: int) -> onnx.GraphProto:
    rng = np.random.default_rng(0)

    def weights(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32), name)

    def constant(name: str, value: object, kind: type) -> onnx.TensorProto:
        return numpy_helper.from_array(np.array(value, kind), name)

    initialisers = [
        weights("tokens", vocabulary_size, WIDTH),
        weights("places", context, WIDTH),
        *(weights(name, WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")),
        weights("head", WIDTH, vocabulary_size),
        constant("split", [0, 0, HEADS, SIZE], np.int64),
        constant("join", [0, 0, WIDTH], np.int64),
        constant("scale", SIZE**-0.5, np.float32),
        constant("hidden", -1e9, np.float32),
        constant("seen", 0.0, np.float32),
        *(constant(name, value, np.int64) for name, value in (("zero", 0), ("one", 1), ("last", [3]), ("two", 2))),
        constant("axis", [1, 2], np.int64),
    ]
    node = helper.make_node
    nodes = [
        node("Gather", ["tokens", "input_ids"], ["t"]),
        node("Gather", ["places", "position_ids"], ["p"]),
        node("Add", ["t", "p"], ["x"]),
    ]
    for kind in ("q", "k", "v"):
        nodes += [
            node("MatMul", ["x", f"w{kind}"], [f"{kind}0"]),
            node("Reshape", [f"{kind}0", "split"], [f"{kind}1"]),
            node("Transpose", [f"{kind}1"], [f"{kind}2"], perm=[0, 2, 1, 3]),
        ]
    nodes += [
        node("Concat", ["past_key_values.0.key", "k2"], ["present.0.key"], axis=2),
        node("Concat", ["past_key_values.0.value", "v2"], ["present.0.value"], axis=2),
        node("Transpose", ["present.0.key"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q2", "kt"], ["s0"]),
        node("Mul", ["s0", "scale"], ["s1"]),
        # a row at position p sees the cells 0..p
        node("Shape", ["attention_mask"], ["mask_shape"]),
        node("Gather", ["mask_shape", "one"], ["total"]),
        node("Range", ["zero", "total", "one"], ["cells"]),
        node("Unsqueeze", ["position_ids", "axis_rows"], ["rows"]),
        node("LessOrEqual", ["cells", "rows"], ["sees"]),
        node("Where", ["sees", "seen", "hidden"], ["bias"]),
        node("Add", ["s1", "bias"], ["s2"]),
        node("Softmax", ["s2"], ["a"], axis=-1),
        node("MatMul", ["a", "present.0.value"], ["o0"]),
        node("Transpose", ["o0"], ["o1"], perm=[0, 2, 1, 3]),
        node("Reshape", ["o1", "join"], ["o2"]),
        node("MatMul", ["o2", "wo"], ["o3"]),
        node("Add", ["x", "o3"], ["y"]),
        node("MatMul", ["y", "head"], ["logits"]),
    ]
    initialisers.append(constant("axis_rows", [1, 3], np.int64))
    value = helper.make_tensor_value_info
    cache = [("key", "past_key_values.0.key", "present.0.key"), ("value", "past_key_values.0.value", "present.0.value")]
    inputs = [
        value("input_ids", TensorProto.INT64, ["batch", "length"]),
        value("attention_mask", TensorProto.INT64, ["batch", "all"]),
        value("position_ids", TensorProto.INT64, ["batch", "length"]),
        *(value(past, TensorProto.FLOAT, ["batch", HEADS, "past", SIZE]) for _, past, _ in cache),
    ]
    outputs = [
        value("logits", TensorProto.FLOAT, ["batch", "length", vocabulary_size]),
        *(value(present, TensorProto.FLOAT, ["batch", HEADS, "all", SIZE]) for _, _, present in cache),
    ]
    used = {name for item in nodes for name in item.input}
    return helper.make_graph(nodes, "tiny", inputs, outputs, [item for item in initialisers if item.name in used])

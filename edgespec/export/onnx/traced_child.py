"""Child process that traces a checkpoint with transformers' ONNX exporter, rewrites, compares, quantises and writes it.

`python -m edgespec.export.onnx.traced_child ORDER` where ORDER is JSON: {source, output, quant, group_size, is_tied}.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgespec.engines.onnx.library import library
from edgespec.engines.onnx.sessions import open_session
from edgespec.export.onnx.canonical import canonicalise, store_transposed
from edgespec.export.onnx.child import follow_parent
from edgespec.export.onnx.graph import read_graph
from edgespec.export.onnx.integer import to_integer
from edgespec.export.onnx.quantise import quantise, save
from edgespec.export.onnx.tied import share_embedding
from edgespec.formats.onnx import MODEL

PAST, WIDTH = 6, 4  # lengths of the traced sample, above 1, because the tracer would treat 1 as fixed
PROBE, ROOM = 20, 32
TOLERANCE = 1e-3  # of the logits' spread: GELU approximations differ by about this much


def windows_of(config: Any) -> list[int]:
    """The sliding window of each layer, or -1."""
    window = getattr(config, "sliding_window", None) or -1
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        is_local = config.model_type == "mistral"
        return [window if is_local else -1] * int(config.num_hidden_layers)
    return [window if kind == "sliding_attention" else -1 for kind in kinds]


def trace(folder: str, output: Path) -> tuple[Any, onnx.ModelProto]:
    """(torch model, traced graph with weights in memory)."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(PAST + WIDTH)[None] % model.config.vocab_size
    sample = {
        "input_ids": ids[:, PAST:],
        "attention_mask": torch.ones(1, PAST + WIDTH, dtype=torch.long),
        "past_key_values": model(ids[:, :PAST], use_cache=True).past_key_values,
    }
    if getattr(model.config, "rope_parameters", None) is None:
        sample["position_ids"] = torch.arange(PAST, PAST + WIDTH)[None]
    config = OnnxConfig(dynamic=True, ort_fusions="cpu")
    OnnxExporter().export(model, sample, config=config).save_pretrained(output)
    graph = onnx.load(output / MODEL)
    shutil.rmtree(output)
    return model, graph


def session(model: onnx.ModelProto, folder: Path) -> Any:
    return open_session(model.SerializeToString(), folder, threads=1, provider="cpu")[0]


def evaluate_part(part: onnx.ModelProto, positions: int) -> Sequence[NDArray[np.float32]]:
    """The outputs of a part of the graph for a pass over `positions` tokens with an empty cache."""
    feeds: dict[str, NDArray[Any]] = {}
    for value in part.graph.input:
        if value.name.startswith("past_key_values."):
            dims = value.type.tensor_type.shape.dim
            feeds[value.name] = np.zeros((1, dims[1].dim_value, 0, dims[3].dim_value), np.float32)
        else:
            is_ids = value.name == "input_ids"
            feeds[value.name] = np.zeros((1, positions), np.int64) if is_ids else np.ones((1, positions), np.int64)
    tables: Sequence[NDArray[np.float32]] = session(part, Path()).run(None, feeds)
    return tables


def check_against(model: Any, path: Path) -> None:
    """Raise ValueError unless two passes with shared past and present buffers give the torch model's logits."""
    import torch

    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, PROBE + WIDTH))
    expected = model(torch.tensor(ids)).logits.numpy()[0]
    graph = session(read_graph(path), path.parent)
    shapes = {value.name: value.shape for value in graph.get_inputs()}
    buffers = {
        name: library().OrtValue.ortvalue_from_numpy(np.zeros((1, shape[1], ROOM, shape[3]), np.float32))
        for name, shape in shapes.items()
        if name.startswith("past_key_values.")
    }
    for start, end in ((0, PROBE), (PROBE, PROBE + WIDTH)):
        binding = graph.io_binding()
        binding.bind_cpu_input("input_ids", ids[:, start:end])
        binding.bind_cpu_input("attention_mask", np.ones((1, end), np.int64))
        if "position_ids" in shapes:
            binding.bind_cpu_input("position_ids", np.arange(start, end)[None])
        binding.bind_output("logits", "cpu")
        for name, buffer in buffers.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), buffer)
        graph.run_with_iobinding(binding)
        off = float(np.abs(binding.get_outputs()[0].numpy()[0] - expected[start:end]).max() / expected.std())
        if not off <= TOLERANCE:
            raise ValueError(f"its traced graph differs from the model by {off:.1e} of the logits' spread")


def main() -> None:
    follow_parent()
    order = json.loads(sys.argv[1])
    output = Path(order["output"])
    print("tracing", flush=True)
    torch_model, graph = trace(order["source"], output / "traced")
    print("rewriting", flush=True)
    config = torch_model.config.get_text_config()
    canonicalise(graph, windows_of(config), lambda part: evaluate_part(part, config.max_position_embeddings))
    save(graph, output)
    print("comparing", flush=True)
    check_against(torch_model, output / MODEL)
    if order["quant"] == "fp32":
        return
    print("quantising and writing", flush=True)
    if order["quant"] == "w8a8":
        to_integer(output, order["group_size"])
        return
    graph = onnx.load(output / MODEL)
    store_transposed(graph.graph)
    save(quantise(graph, order["quant"], order["group_size"]), output)
    if order["is_tied"]:
        share_embedding(output)


if __name__ == "__main__":
    main()

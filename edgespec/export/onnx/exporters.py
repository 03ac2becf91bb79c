"""The exporters: onnxruntime-genai's model builder, and transformers' exporter for architectures it does not support.

Each runs in a child process, `builder_child` or `traced_child`. The traced graph is rewritten to the builder's form
(names of inputs and outputs, cache lengths from the attention mask), so that past and present can share a buffer, and
is compared with the model before it is quantised.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec.errors import CapabilityError
from edgespec.export.onnx.child import run_child
from edgespec.export.onnx.source import Source

# Architectures whose graphs the tests compare with transformers, and close relatives.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GraniteForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "Ernie4_5ForCausalLM",
    "NemotronForCausalLM",
    "OlmoForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
)
TRACED = ("GPT2LMHeadModel",)  # by transformers' exporter
TRACING_STEPS = ("tracing", "rewriting", "comparing", "quantising and writing")
_LAYER = re.compile(r"Reading (?:decoder )?layer (\d+)")
_STEPS_AROUND_LAYERS = 4  # embedding, final norm and head, saving, the files around the graph


def build(order: dict[str, Any], layers: int, progress: Callable[[int, int, str], None]) -> None:
    """Write model.onnx, its data and genai_config.json to `order["output"]`. Raises the errors of `run_child`."""
    total = layers + _STEPS_AROUND_LAYERS
    progress(0, total, "loading weights")

    def on_line(line: str) -> None:
        if found := _LAYER.search(line):
            progress(min(int(found[1]) + 1, layers) + 1, total, f"layer {int(found[1]) + 1} of {layers}")
        elif line.startswith("Saving ONNX model"):
            progress(layers + 2, total, "quantising and writing")

    run_child("edgespec.export.onnx.builder_child", order, on_line)
    progress(layers + 3, total, "writing")


def builder_order(source: Path, output: Path, quant: str, group_size: int, *, architecture: str) -> dict[str, Any]:
    """The child's settings. fp16 uses the builder's GPU layout, because its CPU layout has no shared KV cache."""
    # Windowed caches cannot be rolled back beyond the window, and have another layout.
    settings = {"hf_token": "false", "windowed_kv_cache": "false"}
    if quant in ("int4", "int8"):
        settings |= {"accuracy_level": "4", "block_size": str(group_size)}
    return {
        "source": str(source),
        "output": str(output),
        "precision": "fp32" if quant == "w8a8" else quant,  # its matrix products are rewritten afterwards
        "provider": "webgpu" if quant == "fp16" else "cpu",
        "cache": str(output / "cache"),
        "options": settings,
        "architecture": architecture,
    }


def trace(source: Source, output: Path, quant: str, group_size: int, progress: Callable[[int, int, str], None]) -> None:
    """Write model.onnx and model.onnx.data to `output`. Raises the errors of `run_child`; CapabilityError for fp16."""
    if quant == "fp16":
        raise CapabilityError(
            f"a {source.architecture} cannot be exported as fp16, which needs the builder; allowed: int4, int8, "
            "w8a8, fp32"
        )
    progress(0, len(TRACING_STEPS), TRACING_STEPS[0])

    def on_line(line: str) -> None:
        if line in TRACING_STEPS:
            progress(TRACING_STEPS.index(line), len(TRACING_STEPS), line)

    order = {
        "source": str(source.folder),
        "output": str(output),
        "quant": quant,
        "group_size": group_size,
        "architecture": source.architecture,
        "is_tied": source.is_tied,
    }
    run_child("edgespec.export.onnx.traced_child", order, on_line)

"""The default exporter: onnxruntime-genai's model builder, driven through `builder_child`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec.export.onnx.child import run_child

# The architectures whose graphs the tests compare with transformers, and their close relatives.
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
_LAYER = re.compile(r"Reading (?:decoder )?layer (\d+)")
_STEPS_AROUND_LAYERS = 4  # embedding, final norm and head, saving, the files around the graph


def build(order: dict[str, Any], layers: int, progress: Callable[[int, int, str], None]) -> None:
    """Write model.onnx, model.onnx.data and genai_config.json into `order["output"]`. Raises as `run_child`."""
    total = layers + _STEPS_AROUND_LAYERS
    progress(0, total, "loading weights")

    def on_line(line: str) -> None:
        if found := _LAYER.search(line):
            progress(min(int(found[1]) + 1, layers) + 1, total, f"layer {int(found[1]) + 1} of {layers}")
        elif line.startswith("Saving ONNX model"):
            progress(layers + 2, total, "quantising and writing")

    run_child("edgespec.export.onnx.builder_child", order, on_line)
    progress(layers + 3, total, "writing")


def builder_order(
    source: Path, output: Path, quant: str, group_size: int, *, architecture: str, options: dict[str, str]
) -> dict[str, Any]:
    """What the child needs to know. fp16 graphs take the builder's GPU layout: its CPU one has no shared KV cache."""
    # Windowed caches cannot be rolled back beyond the window, and have a layout of their own.
    settings = {"hf_token": "false", "windowed_kv_cache": "false", **options}
    if quant in ("int4", "int8"):
        settings |= {"accuracy_level": "4", "block_size": str(group_size)}
    return {
        "source": str(source),
        "output": str(output),
        "precision": "fp32" if quant == "w8a8" else quant,  # products are rewritten afterwards
        "provider": "webgpu" if quant == "fp16" else "cpu",
        "cache": str(output / "cache"),
        "options": settings,
        "architecture": architecture,
    }

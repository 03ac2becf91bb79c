"""The fallback exporter: transformers' own ONNX exporter, driven through `traced_child`, for what the builder refuses.

The traced graph is brought into the builder's form (names of inputs and outputs, cache lengths from the attention
mask), so that past and present may be one buffer, and is compared with the model itself before it is quantised.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgespec.errors import CapabilityError
from edgespec.export.onnx.child import run_child
from edgespec.export.onnx.source import Source

STEPS = ("tracing", "rewriting", "comparing", "quantising and writing")


def trace(source: Source, output: Path, quant: str, group_size: int, progress: Callable[[int, int, str], None]) -> None:
    """Write model.onnx and model.onnx.data into `output`. Raises as `run_child`, CapabilityError for fp16."""
    if quant == "fp16":
        raise CapabilityError(
            f"a {source.architecture} cannot be exported as fp16: the builder does not know it; allowed: int4, int8, "
            "w8a8, fp32"
        )
    progress(0, len(STEPS), STEPS[0])

    def on_line(line: str) -> None:
        if line in STEPS:
            progress(STEPS.index(line), len(STEPS), line)

    order = {
        "source": str(source.folder),
        "output": str(output),
        "quant": quant,
        "group_size": group_size,
        "architecture": source.architecture,
        "is_tied": source.is_tied,
    }
    run_child("edgespec.export.onnx.traced_child", order, on_line)

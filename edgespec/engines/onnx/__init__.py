"""The ONNX Runtime engine."""

import sys

from edgespec.installation import IMPORT_FAILURES, interrupts_deferred, not_importable
from edgespec.platform.memory import require_left

if "onnx" not in sys.modules:
    require_left("reading ONNX files", 24 << 20)  # it takes 9 MiB of data and 18 of addresses, and crashes without
try:
    with interrupts_deferred():
        from edgespec.engines.onnx.engine import OnnxEngine
except IMPORT_FAILURES as exc:
    raise not_importable("reading ONNX files", exc, "onnx") from exc

__all__ = ["OnnxEngine"]

"""The ONNX Runtime engine."""

import sys

from edgespec.engines.limits import require_left
from edgespec.installation import IMPORT_FAILURES, not_importable

if "onnx" not in sys.modules:
    require_left("reading ONNX files", 24 << 20)  # it takes 9 MiB of data and 18 of addresses, and crashes without
try:
    from edgespec.engines.onnx.engine import OnnxEngine
except IMPORT_FAILURES as exc:
    raise not_importable("reading ONNX files", exc, "onnx") from exc

__all__ = ["OnnxEngine"]

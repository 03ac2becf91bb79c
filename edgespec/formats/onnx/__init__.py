"""ONNX graphs of language models as files: the names that all of them share."""

from __future__ import annotations

MODEL, DATA = "model.onnx", "model.onnx.data"
MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators

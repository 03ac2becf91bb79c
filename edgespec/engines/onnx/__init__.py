"""The ONNX Runtime engine."""

from edgespec.engines.onnx.engine import OnnxEngine

__all__ = ["OnnxEngine"]

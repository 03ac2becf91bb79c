"""Export of Hugging Face checkpoints to ONNX graphs for the ONNX Runtime engine."""

from __future__ import annotations

from edgespec.export.onnx.convert import EXPORTERS, GROUP_SIZES, ONNX_QUANTS, OnnxExport, export_onnx

__all__ = ["EXPORTERS", "GROUP_SIZES", "ONNX_QUANTS", "OnnxExport", "export_onnx"]

"""Export of Hugging Face checkpoints to ONNX graphs for the ONNX Runtime engine."""

from __future__ import annotations

from edgespec.export.onnx.convert import EXPORTERS, GROUP_SIZES, ONNX_QUANTS, OnnxExport, export_onnx

__all__ = ["EXPORTERS", "GROUP_SIZES", "ONNX_QUANTS", "OnnxExport", "early_exit_onnx", "export_onnx", "partition_onnx"]


def __getattr__(name: str) -> object:
    # Imported on use: cutting needs onnx, the rest of this package's API does not.
    if name in ("early_exit_onnx", "partition_onnx"):
        from edgespec.export.onnx import cut

        return getattr(cut, name)
    raise AttributeError(name)

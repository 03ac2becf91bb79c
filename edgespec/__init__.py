"""edgespec: speculative decoding on one device, for GGUF and ONNX models."""

from __future__ import annotations

from edgespec.errors import Busy, EdgespecError

TYPE_CHECKING = False  # typing itself takes longer to import than all else here: see __main__
if TYPE_CHECKING:
    from typing import Any

    from edgespec.config.options import GenerateOptions, LoadOptions, Sampling
    from edgespec.generation.handle import Generation, Result
    from edgespec.reports import Stats, TokenEvent
    from edgespec.runtime import Model, load

__version__ = "0.1.0"
__all__ = [
    "Busy",
    "EdgespecError",
    "GenerateOptions",
    "Generation",
    "LoadOptions",
    "Model",
    "Result",
    "Sampling",
    "Stats",
    "TokenEvent",
    "__version__",
    "load",
]
_HOMES = {"Model": "runtime", "load": "runtime", "Generation": "generation.handle", "Result": "generation.handle"}
_HOMES |= {"Sampling": "config.options", "Stats": "reports", "TokenEvent": "reports"}
_HOMES |= {"GenerateOptions": "config.options", "LoadOptions": "config.options"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `import edgespec` and `edgespec --help` load neither numpy nor an engine."""
    if name not in _HOMES:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"edgespec.{_HOMES[name]}"), name)

"""Marks of tests for what this machine may lack."""

from __future__ import annotations

import pytest

from edgespec.installation import has_engine
from edgespec.kernels.library import library_path

NEEDS_KERNELS = pytest.mark.skipif(
    library_path() is None, reason="the kernels are not built: scripts/run.py test builds them"
)
NEEDS_LLAMA = pytest.mark.skipif(not has_engine("llamacpp"), reason="llama.cpp is not installed")


def needs_gpu() -> str:
    """The name of the first GPU that llama.cpp sees. Skips the test where it sees none."""
    from edgespec.engines.llamacpp.devices import gpus

    found = gpus()
    if not found:
        pytest.skip("llama.cpp sees no GPU here (docs/contributing.md: a build for Vulkan on Mesa's software device)")
    return found[0].name


def is_software(name: str) -> bool:
    """Whether the GPU of this name is a program: Mesa's llvmpipe."""
    from edgespec.engines.llamacpp.devices import gpus

    return any(device.name == name and "llvmpipe" in device.description for device in gpus())

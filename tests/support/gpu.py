"""A GPU of this build of llama.cpp for tests, or a program that acts as one: docs/contributing.md tells of both."""

from __future__ import annotations

import pytest


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

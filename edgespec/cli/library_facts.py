"""What the llama.cpp library says of itself, as one JSON object: `python -m edgespec.cli.library_facts`.

A build for another processor ends its process at the first instruction it lacks, so doctor asks in a child.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from edgespec.engines.llamacpp import devices
from edgespec.engines.llamacpp.library import library, version
from edgespec.errors import CapabilityError


def describe_library() -> dict[str, Any]:
    """Version, build features, backends, the devices that this build sees, and whether it has RPC. Memory in bytes."""
    try:
        llama = library()
    except CapabilityError as exc:
        return {"available": False, "reason": str(exc)}
    found = _devices()
    return {
        "available": True,
        "version": version(),
        "features": _features(llama.llama_print_system_info().decode("utf-8", errors="replace")),
        "gpu_offload": any("gpu" in device["kind"] for device in found),
        "rpc": bool(llama.llama_supports_rpc()),
        "backends": _backends(),
        "devices": found,
    }


def _features(system_info: str) -> list[str]:
    """'CPU : AVX2 = 1 | NEON = 0 | ...' as the names that are on."""
    items = system_info.replace(":", "|").split("|")
    return [item.split("=")[0].strip() for item in items if item.strip().endswith("= 1")]


def _backends() -> list[str]:
    try:
        return devices.backends()
    except CapabilityError:
        return []


def _devices() -> list[dict[str, Any]]:
    """ggml's devices; only the processor where the library does not export the question."""
    try:
        return [asdict(device) for device in devices.devices()]
    except CapabilityError:
        return [asdict(devices.Device("CPU", "the processor", "cpu", 0, 0))]


if __name__ == "__main__":
    print(json.dumps(describe_library()))

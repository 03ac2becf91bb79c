"""What the llama.cpp library says of itself, as one JSON object: `python -m edgespec.cli.library_facts`.

A build for another processor ends its process at the first instruction it lacks, so doctor asks in a child.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

from edgespec.engines.llamacpp.library import library, version
from edgespec.errors import CapabilityError


def describe_library() -> dict[str, Any]:
    """Version, build features, and whether this build can use a GPU and which devices it sees."""
    try:
        llama = library()
    except CapabilityError as exc:
        return {"available": False, "reason": str(exc)}
    return {
        "available": True,
        "version": version(),
        "features": _features(llama.llama_print_system_info().decode("utf-8", errors="replace")),
        "gpu_offload": bool(llama.llama_supports_gpu_offload()),
        "devices": _devices(llama._lib),
    }


def _features(system_info: str) -> list[str]:
    """'CPU : AVX2 = 1 | NEON = 0 | ...' as the names that are on."""
    items = system_info.replace(":", "|").split("|")
    return [item.split("=")[0].strip() for item in items if item.strip().endswith("= 1")]


def _devices(lib: Any) -> list[str]:
    """ggml's devices; only the processor where the library does not export the question (Windows)."""
    try:
        count, get, describe = (
            lib.ggml_backend_dev_count,
            lib.ggml_backend_dev_get,
            lib.ggml_backend_dev_description,
        )
    except AttributeError:
        return ["CPU"]
    count.restype, get.restype, describe.restype = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
    get.argtypes, describe.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    return [describe(get(index)).decode("utf-8", errors="replace") for index in range(count())]


if __name__ == "__main__":
    print(json.dumps(describe_library()))

"""Execution providers in packages of their own, which are added to the onnxruntime that is installed.

`onnxruntime-ep-webgpu` brings WebGPU (Direct3D 12, Metal or Vulkan) to the stock package on Windows, macOS and Linux.
https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.installation import is_importable

# Our name of a provider -> the module that says where its library lies.
PLUGINS = {"webgpu": "onnxruntime_ep_webgpu"}
# Our name of a provider -> its library in onnxruntime's own package, where that brings it.
_BUILT_IN = {"cuda": "*onnxruntime_providers_cuda*", "dml": "DirectML*"}
failures: dict[str, str] = {}  # by our name of a provider: why its plugin is of no use here


def possible_devices() -> tuple[str, ...]:
    """Our names of the devices other than the CPU that the installed packages are for; nothing is imported.

    The machine may lack them, or they may lack an operator of a model.
    """
    runtime = find_spec("onnxruntime")
    folder = None if runtime is None or runtime.origin is None else Path(runtime.origin).parent / "capi"
    built_in = [name for name, files in _BUILT_IN.items() if folder is not None and any(folder.glob(files))]
    return (*built_in, *(name for name, module in PLUGINS.items() if is_importable(module)))


@cache
def plugin_devices(onnxruntime: Any) -> Mapping[str, Any]:
    """By our name of a provider: its first device on this machine. A plugin without one is left out.

    The plugins that are installed are registered, once: they stay in the process. Their libraries report what they lack
    by exceptions of many kinds, and none of them may keep the CPU from working.
    """
    found: dict[str, Any] = {}
    for name, module in PLUGINS.items():
        if find_spec(module) is None:
            continue
        plugin = import_module(module)
        try:
            onnxruntime.register_execution_provider_library(f"edgespec-{name}", plugin.get_library_path())
        except Exception as exc:  # of the runtime: another version, a library that a system lacks
            failures[name] = " ".join(str(exc).split())
            continue
        names = plugin.get_ep_names()
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name in names]
        if devices:
            found[name] = devices[0]
        else:
            failures[name] = "it finds no GPU"
    return found


def is_software(device: Any) -> bool:
    """Whether a device is a program on the CPU that acts as a GPU, which is slower than the CPU's own provider."""
    return str(device.device.type).endswith("CPU")

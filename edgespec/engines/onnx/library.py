"""The only module that imports onnxruntime: what it offers on this machine, and its exceptions as ours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any

from edgespec.errors import Cancelled, EngineError
from edgespec.installation import IMPORT_FAILURES, NO_TELEMETRY, not_importable

# Best first. Ours are onnxruntime's names of the memory of the devices.
PROVIDERS = {
    "cuda": "CUDAExecutionProvider",
    "dml": "DmlExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
    "cpu": "CPUExecutionProvider",
}
ERRORS_ONLY = 3
# A provider in a package of its own, which is added to the installed onnxruntime: Direct3D 12, Metal, Vulkan.
# https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/
PLUGIN, PLUGIN_MODULE = "webgpu", "onnxruntime_ep_webgpu"
failures: dict[str, str] = {}  # by our name of a provider: why its plugin is of no use here


@cache
def library() -> Any:
    """The module `onnxruntime`, with its log and its telemetry turned off.

    Telemetry is left on where the environment says ORT_DISABLE_TELEMETRY=0. Raises CapabilityError when the module is
    not installed.
    """
    os.environ.setdefault(NO_TELEMETRY, "1")
    try:
        import onnxruntime
    except IMPORT_FAILURES as exc:
        raise not_importable("an ONNX model", exc, "onnxruntime") from exc
    if os.environ[NO_TELEMETRY] == "1":
        onnxruntime.disable_telemetry_events()  # for Windows builds that trace, and where it was imported before
    onnxruntime.set_default_logger_severity(ERRORS_ONLY + 1)
    return onnxruntime


@cache
def version() -> str:
    return str(library().__version__)


@cache
def _built_in() -> tuple[str, ...]:
    return tuple(library().get_available_providers())


def installed_providers() -> tuple[str, ...]:
    """Our names of the devices that this build of ONNX Runtime supports, best first; the machine may lack them."""
    available = _built_in()  # first: a plugin that is registered stands among them, with a device or without
    devices = plugin_devices(library())
    return tuple(name for name, provider in PROVIDERS.items() if provider in available or name in devices)


@cache
def plugin_devices(onnxruntime: Any) -> Mapping[str, Any]:
    """By our name of the plugin's provider: its first device on this machine; empty without one.

    It is registered, once, and stays in the process. Its library reports what it lacks by exceptions of many kinds, and
    none of them may keep the CPU from working.
    """
    if find_spec(PLUGIN_MODULE) is None:
        return {}
    plugin = import_module(PLUGIN_MODULE)
    try:
        onnxruntime.register_execution_provider_library(f"edgespec-{PLUGIN}", plugin.get_library_path())
    except Exception as exc:  # of the runtime: another version, a library that a system lacks
        failures[PLUGIN] = " ".join(str(exc).split())
        return {}
    names = plugin.get_ep_names()
    for device in onnxruntime.get_ep_devices():
        if device.ep_name in names:
            return {PLUGIN: device}
    failures[PLUGIN] = "it finds no GPU"
    return {}


def device_identity(name: str) -> str:
    """Identifies what was measured on: the provider's version and its device; "" for the CPU.

    `name`: ours of a provider. Two devices of one kind differ by their own names, where the driver gives these.
    """
    if name not in PROVIDERS or name == "cpu":
        return ""
    built_in = (each for each in library().get_ep_devices() if each.ep_name == PROVIDERS[name])
    found = plugin_devices(library()).get(name) or next(built_in, None)
    if found is None:
        return name
    device = found.device
    # Not where the provider's library lies, which another environment changes.
    versions = sorted((key, value) for key, value in found.ep_metadata.items() if key != "library_path")
    return f"{versions} {sorted(device.metadata.items())} {device.vendor} {device.vendor_id} {device.device_id}"


def is_hardware(name: str) -> bool:
    """Whether our provider `name` is more than software that acts as a GPU, which is slower than the CPU's provider."""
    found = plugin_devices(library()).get(name)
    return found is None or not str(found.device.type).endswith("CPU")


@cache
def load_cuda() -> str:
    """Load CUDA and cuDNN from where pip puts them, where the system's loader does not look.

    Returns what onnxruntime prints: what it did not find, and nothing in a build for the CPU.
    """
    with redirect_stdout(StringIO()) as said:
        library().preload_dlls()
    return " ".join(said.getvalue().split())


@cache
def failures_of_library() -> tuple[type[Exception], ...]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = "EPFail Fail InvalidArgument InvalidGraph InvalidProtobuf NoSuchFile NotImplemented RuntimeException"
    return RuntimeError, *(getattr(state, name) for name in names.split())  # which a run with IO binding raises


def run_options() -> Any:
    """Options of a pass, which `terminate` ends.

    The library's Python asks every pass for this entry and catches an exception where it is not set: .1 ms. -1 captures
    no graph of a GPU, as without it.
    """
    found = library().RunOptions()
    found.add_run_config_entry("gpu_graph_id", "-1")
    return found


@contextmanager
def translated(run_options: Any) -> Iterator[None]:
    """Turn exceptions of a pass into ours: Cancelled if `run_options.terminate` ended it, else EngineError."""
    try:
        yield
    except failures_of_library() as exc:
        if run_options.terminate:
            run_options.terminate = False
            raise Cancelled("the pass was cancelled; the cache is as before") from exc
        raise EngineError(f"ONNX Runtime failed in a pass: {' '.join(str(exc).split())}") from exc

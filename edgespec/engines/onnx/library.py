"""The one file that imports onnxruntime: makes sessions, chooses the device, translates its exceptions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.engines.onnx.unsigned import Weights, make_unsigned
from edgespec.errors import Cancelled, CapabilityError, ConfigError, EngineError, ModelFileError
from edgespec.formats.onnx import WHOLE_PRODUCT
from edgespec.installation import install_command, reinstall_command

# By preference; the second name is what onnxruntime calls the memory of the device.
PROVIDERS = {
    "cuda": ("CUDAExecutionProvider", "cuda"),
    "dml": ("DmlExecutionProvider", "dml"),
    "webgpu": ("WebGpuExecutionProvider", "webgpu"),
    "cpu": ("CPUExecutionProvider", "cpu"),
}
ERRORS_ONLY = 3
SATURATION_SIZE = 64


@cache
def library() -> Any:
    """The module `onnxruntime`, its log quiet. Raises CapabilityError when it is not installed."""
    try:
        import onnxruntime
    except ImportError as exc:
        raise CapabilityError(
            f"ONNX Runtime cannot be loaded: {exc}. Install it again: {reinstall_command('onnxruntime')}"
        ) from exc
    onnxruntime.set_default_logger_severity(ERRORS_ONLY + 1)
    return onnxruntime


@cache
def version() -> str:
    return str(library().__version__)


def installed_providers() -> tuple[str, ...]:
    """Our names of the devices that this build of ONNX Runtime knows, best first. It may know one it cannot reach."""
    available = library().get_available_providers()
    return tuple(name for name, (provider, _) in PROVIDERS.items() if provider in available)


@dataclass(frozen=True, slots=True)
class Device:
    """Where a session computes: our name of the provider, and onnxruntime's name of its memory."""

    provider: str
    memory: str


def open_session(graph: bytes, folder: Path, *, threads: int, provider: str) -> tuple[Any, Device]:
    """A session over a serialised graph whose weights lie in `folder`.

    `provider` "auto" takes the best one that is installed and works. Raises ConfigError for an unknown name,
    CapabilityError for one that is not there or lacks an operator of this model, ModelFileError for a bad model.
    """
    installed = installed_providers()
    if provider != "auto" and provider not in PROVIDERS:
        raise ConfigError(f"provider {provider!r} is not known; allowed: auto, {', '.join(PROVIDERS)}")
    if provider != "auto" and provider not in installed:
        raise CapabilityError(
            f"provider {provider!r} is not in this build of ONNX Runtime, which has: {', '.join(installed)}. "
            f"For an NVIDIA GPU: {install_command('gpu')}"
        )
    for name in (provider,) if provider != "auto" else installed:
        try:
            return _open(graph, folder, threads, name), Device(name, PROVIDERS[name][1])
        except CapabilityError:
            if provider != "auto":
                raise
    raise AssertionError("the CPU raises ModelFileError, never CapabilityError")


def _open(graph: bytes, folder: Path, threads: int, name: str) -> Any:
    ort = library()
    options, graph, weights = _options(graph, folder, threads, name)
    try:
        session = ort.InferenceSession(graph, options, providers=[PROVIDERS[name][0]])
        session.edgespec_weights = weights  # it reads them as long as it lives, and holds no reference to them
        return session
    except _failures() as exc:
        reason = " ".join(str(exc).split())
        if name == "cpu":
            raise ModelFileError(f"ONNX Runtime refused the model in {folder}: {reason}. Export it again") from exc
        raise CapabilityError(f"this model cannot run on {name}: {reason}. Use --provider cpu") from exc


def try_graph(graph: bytes, folder: Path) -> None:
    """Open a session that neither improves the graph nor packs its weights, for what ends a process. Raises as it."""
    ort = library()
    options = ort.SessionOptions()
    options.log_severity_level = ERRORS_ONLY + 1
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    graph, place = with_real_files(graph, folder)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(place))
    try:
        ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except _failures() as exc:
        reason = " ".join(str(exc).split())
        raise ModelFileError(f"ONNX Runtime refused the model in {folder}: {reason}. Export it again") from exc


def with_real_files(graph: bytes, folder: Path) -> tuple[bytes, Path]:
    """The graph with its weight files named as they really are, and the folder that these names count from.

    ONNX Runtime reads nothing outside the folder it is given, and follows links before it looks where a file lies;
    caches of downloads keep every file as a link into another folder.
    """
    if not any(entry.is_symlink() for entry in folder.iterdir()):
        return graph, folder
    import onnx

    model = onnx.ModelProto.FromString(graph)
    entries = [item for tensor in model.graph.initializer for item in tensor.external_data if item.key == "location"]
    real = {item.value: Path(os.path.realpath(folder / item.value)) for item in entries}
    if not real:
        return graph, folder
    place = Path(os.path.commonpath([file.parent for file in real.values()]))
    for item in entries:
        item.value = real[item.value].relative_to(place).as_posix()
    return model.SerializeToString(), place


def _options(graph: bytes, folder: Path, threads: int, name: str) -> tuple[Any, bytes, Weights]:
    """How a session is opened, the graph that it opens, and weights that have to live as long as the session."""
    ort = library()
    weights: Weights = {}
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY + 1
    # Threads that spin on after a pass take the cores from the other model of the pair: a round took 57 ms, not 8.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if name != "cpu":
        # Without this an operator that the device lacks runs on the CPU unseen, with a copy each way.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if name == "cpu" and WHOLE_PRODUCT.encode() in graph and products_saturate():
        # Signed weights become unsigned ones, for which every processor has an exact kernel; it takes a second copy.
        graph, weights, is_left = make_unsigned(graph, folder)
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
        if is_left:
            options.add_session_config_entry("session.x64quantprecision", "1")
    graph, place = with_real_files(graph, folder)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(place))
    return options, graph, weights


@cache
def products_saturate() -> bool:
    """Whether sums of unsigned times signed bytes are cut off at 16 bits, as on x86 processors without VNNI."""
    from onnx import TensorProto, helper, numpy_helper

    weights = np.full((SATURATION_SIZE, SATURATION_SIZE), 127, np.int8)
    found, read = (
        helper.make_tensor_value_info(name, kind, ["rows", SATURATION_SIZE])
        for name, kind in (("sums", TensorProto.INT32), ("codes", TensorProto.UINT8))
    )
    product = helper.make_node("MatMulInteger", ["codes", "weights"], ["sums"])
    graph = helper.make_graph([product], "saturation", [read], [found], [numpy_helper.from_array(weights, "weights")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = _open(model.SerializeToString(), Path(), 1, "cpu")
    exact = 255 * 127 * SATURATION_SIZE
    rows = (np.full((count, SATURATION_SIZE), 255, np.uint8) for count in (1, 8))  # a lone row has its own kernel
    return any((session.run(None, {"codes": codes})[0] != exact).any() for codes in rows)


@cache
def _failures() -> tuple[type[Exception], ...]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = "EPFail Fail InvalidArgument InvalidGraph InvalidProtobuf NoSuchFile NotImplemented RuntimeException"
    return RuntimeError, *(getattr(state, name) for name in names.split())  # a bound run raises the built-in


@contextmanager
def translated(run_options: Any) -> Iterator[None]:
    """Failures of a pass as our own errors; a pass that `run_options.terminate` ended is Cancelled."""
    try:
        yield
    except _failures() as exc:
        if run_options.terminate:
            run_options.terminate = False
            raise Cancelled("the pass was cancelled; the cache is as before") from exc
        raise EngineError(f"ONNX Runtime failed in a pass: {' '.join(str(exc).split())}") from exc

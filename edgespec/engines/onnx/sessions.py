"""Sessions of ONNX Runtime on one device: making them, and which devices are to be tried."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

from numpy.typing import NDArray

from edgespec.engines.booked import BookedEngine
from edgespec.engines.model_files import HeldFiles
from edgespec.engines.onnx.library import (
    ERRORS_ONLY,
    PROVIDERS,
    failures,
    failures_of_library,
    installed_providers,
    is_hardware,
    library,
    load_cuda,
    plugin_devices,
    translated,
)
from edgespec.errors import CapabilityError, ConfigError, ModelFileError
from edgespec.formats.onnx.tiles import PRODUCT
from edgespec.installation import install_command
from edgespec.kernels.interface import held
from edgespec.kernels.library import library_path

Arrays = Mapping[str, NDArray[Any]]
NO_ARRAYS: Arrays = MappingProxyType({})
_made: WeakSet[Any] = WeakSet()
MAX_BINDINGS = 512


def providers_for(provider: str) -> tuple[str, ...]:
    """The one `provider`, or for "auto" all that are installed: the best first, the CPU last.

    Raises ConfigError for an unknown name, CapabilityError for one that is not installed.
    """
    installed = installed_providers()
    if provider != "auto" and provider not in PROVIDERS:
        raise ConfigError(f"provider {provider!r} is not known; allowed: auto, {', '.join(PROVIDERS)}")
    if provider != "auto" and provider not in installed:
        raise CapabilityError(
            f"{provider} cannot be used: {failures.get(provider, 'it is not in this build of ONNX Runtime')}. It has: "
            f"{', '.join(installed)}. For an NVIDIA GPU: {install_command('gpu')}. For others: "
            f"{install_command('webgpu')}"
        )
    return (provider,) if provider != "auto" else tuple(filter(is_hardware, installed))


def open_session(
    graph: bytes,
    folder: Path,
    *,
    threads: int,
    provider: str,
    arrays: Arrays = NO_ARRAYS,
    is_trial: bool = False,
) -> Any:
    """A session of a serialised graph whose weights are in `folder` or `arrays`, on one of `providers_for`.

    `is_trial`: the graph is not optimised, nor are its weights packed. Raises CapabilityError for a provider that lacks
    an operator of this model, ModelFileError for a bad model.
    """
    ort, options = library(), library().SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = ERRORS_ONLY + 1
    graph, place = with_real_files(graph, folder)
    entries = {"session.model_external_initializers_file_folder_path": str(place)}
    # Threads that spin after a pass slow the other model of the pair down: a round took 57 ms instead of 8.
    entries["session.force_spinning_stop"] = "1"
    if is_trial:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        entries["session.disable_prepacking"] = "1"
    if provider != "cpu":
        # Otherwise operators that the device lacks would silently run on the CPU, with copies in between.
        entries["session.disable_cpu_ep_fallback"] = "1"
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    if (kernels := library_path()) is not None:
        options.register_custom_ops_library(str(kernels))
    if arrays:  # a GGUF. Else a second pass of one width gets a block for all results, beside those of the first.
        options.enable_mem_pattern = False
    try:
        if provider == "cuda":
            load_cuda()
        if device := plugin_devices(ort).get(provider):
            options.add_provider_for_devices([device], {})
        providers = None if device else [PROVIDERS[provider]]
        with _given(graph, arrays, options) if arrays else nullcontext(graph) as made:
            session = ort.InferenceSession(made, options, providers=providers)
    except failures_of_library() as exc:
        said = " ".join(str(exc).split())
        if provider == "cpu":
            raise ModelFileError(f"ONNX Runtime refused the model in {folder}: {said}. Export it again") from exc
        raise CapabilityError(
            f"this model cannot run on {provider}: {reason(provider, graph, said)}. Use --provider cpu"
        ) from exc
    if arrays:  # it reads them as long as it lives, and holds no reference to them
        session.edgespec_weights = arrays
    _made.add(session)
    return session


@contextmanager
def _given(graph: bytes, arrays: Arrays, options: Any) -> Iterator[bytes]:
    """The graph as a session can be made of it with `options` while this lasts; it takes those `arrays` that it names.

    Tiles are read where they are, other arrays are copied.
    """
    import onnx

    model = onnx.ModelProto.FromString(graph)
    own = [tensor for tensor in model.graph.initializer if tensor.name in arrays]
    packed = {t.name: arrays[t.name] for t in own if t.data_type == t.UINT8}
    others = {t.name: library().OrtValue.ortvalue_from_numpy(arrays[t.name]) for t in own if t.name not in packed}
    if others:
        options.add_external_initializers(list(others), list(others.values()))
    with held(packed) as numbers:
        for tensor in own:
            if tensor.name in numbers:
                tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=tensor.UINT8, dims=[8]))
                tensor.raw_data = numbers[tensor.name]
        yield model.SerializeToString()


class Bindings:
    """What the passes of a model read and write, by their shapes, in `session`, which may be replaced."""

    def __init__(self, session: Any, run_options: Any) -> None:
        self.session, self._options = session, run_options
        self._made: dict[tuple[int, ...], Any] = {}

    def use(self, session: Any) -> None:
        """Run later passes in another session of the same graph."""
        if session is not self.session:
            self.session = session
            self._made.clear()

    def of(self, shape: tuple[int, ...], bind: Callable[..., None]) -> Any:
        """That of a pass of this shape, which `bind(binding, *shape)` fills."""
        if len(self._made) >= MAX_BINDINGS:
            self._made.clear()
        found = self._made.get(shape)
        if found is None:
            found = self.session.io_binding()
            bind(found, *shape)
            self._made[shape] = found
        return found

    def run(self, binding: Any, *, on_device: bool = False) -> None:
        """One pass. Raises Cancelled, EngineError."""
        with translated(self._options):
            self.session.run_with_iobinding(binding, self._options)
            if on_device:
                binding.synchronize_outputs()  # else the cache may be read before the device has written it

    def close(self) -> None:
        """Let go of the session."""
        self._made.clear()
        del self.session


class SessionEngine(BookedEngine):
    """One ONNX model. Logits stay valid until the next `forward`. `_options`: of all its passes."""

    states_of = "all rows"  # they are taken before the head keeps those whose logits are wanted
    _options: Any
    _held: HeldFiles
    _has_hidden: bool

    def give_hidden_states(self, wanted: bool) -> None:
        """As in the base class; a graph that has them as an output computes them in every pass, at no cost."""
        self._require_open()
        if wanted and not self._has_hidden:
            raise CapabilityError("this model was loaded without hidden states: load it with hidden_states=True")

    @property
    def _is_cancelled(self) -> bool:
        return bool(self._options.terminate)

    @_is_cancelled.setter
    def _is_cancelled(self, wanted: bool) -> None:
        self._options.terminate = wanted


def reason(name: str, graph: bytes, said: str) -> str:
    """Why `graph` cannot run on `name`, of which ONNX Runtime `said` something."""
    if PRODUCT.encode() in graph:
        return "edgespec's own kernels run on processors only; export it with --quant int4 or int8"
    missing = load_cuda() if name == "cuda" else ""
    return f"{missing} ({said})" if missing else said


def _keep_in_fork() -> None:
    """A session that is freed waits for its threads to end, and in a fork they do not exist: it stays for ever."""
    for session in list(_made):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_fork)


def with_real_files(graph: bytes, folder: Path) -> tuple[bytes, Path]:
    """The graph with symbolic links to weight files resolved, and the folder that their names are relative to.

    ONNX Runtime reads nothing outside the folder it is given, links followed; caches of downloads keep every file as a
    link into another folder.
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

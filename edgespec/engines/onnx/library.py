"""The only module that imports onnxruntime: what it offers on this machine, its sessions, its exceptions as ours."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import EngineFacts
from edgespec.engines.booked import BookedEngine, SequenceBook
from edgespec.engines.model_files import HeldFiles, StateStamp
from edgespec.engines.onnx.graph import HIDDEN, LOGITS, Graph
from edgespec.errors import Cancelled, CapabilityError, ConfigError, EngineError, ModelFileError
from edgespec.formats.onnx.tiles import PRODUCT
from edgespec.installation import IMPORT_FAILURES, NO_TELEMETRY, install_command, interrupts_deferred, not_importable
from edgespec.kernels.interface import held
from edgespec.kernels.library import library_path
from edgespec.vocabulary import Vocabulary

if TYPE_CHECKING:
    from edgespec.engines.onnx.settings import OnnxSettings
    from edgespec.engines.onnx.source import GraphSource

# Best first. Ours are onnxruntime's names of the memory of the devices.
PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
ERRORS_ONLY = 3


@cache
def library() -> Any:
    """The module `onnxruntime`, with its log and its telemetry turned off.

    Telemetry is left on where the environment says ORT_DISABLE_TELEMETRY=0. Raises CapabilityError when the module is
    not installed.
    """
    os.environ.setdefault(NO_TELEMETRY, "1")
    try:
        with interrupts_deferred():
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
def installed_providers() -> tuple[str, ...]:
    """Our names of the devices that this build of ONNX Runtime supports, best first; the machine may lack them."""
    available = library().get_available_providers()
    return tuple(name for name, provider in PROVIDERS.items() if provider in available)


def device_identity(name: str) -> str:
    """Identifies what was measured on: the provider's version and its device; "" for the CPU.

    `name`: ours of a provider. Two devices of one kind differ by their own names, where the driver gives these.
    """
    if name == "cpu":
        return ""
    found = next((each for each in library().get_ep_devices() if each.ep_name == PROVIDERS[name]), None)
    if found is None:
        return name
    device = found.device
    # Not where the provider's library lies, which another environment changes.
    versions = sorted((key, value) for key, value in found.ep_metadata.items() if key != "library_path")
    return f"{versions} {sorted(device.metadata.items())} {device.vendor} {device.vendor_id} {device.device_id}"


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


class Translated:  # what contextlib makes of a function takes 5 microseconds of each pass
    """Turn exceptions of a pass into ours: Cancelled if `run_options.terminate` ended it, else EngineError."""

    def __init__(self, run_options: Any) -> None:
        self._options = run_options

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> None:
        if exc is None or not isinstance(exc, failures_of_library()):
            return
        if self._options.terminate:
            self._options.terminate = False
            raise Cancelled("the pass was cancelled; the cache is as before") from exc
        raise EngineError(f"ONNX Runtime failed in a pass: {' '.join(str(exc).split())}") from exc


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
            f"{provider} cannot be used: it is not in this build of ONNX Runtime, which has: {', '.join(installed)}. "
            f"For an NVIDIA GPU: {install_command('gpu')}; on others take the GGUF, which llama.cpp runs there"
        )
    return (provider,) if provider != "auto" else installed


def open_session(
    graph: bytes,
    folder: Path,
    *,
    threads: int = 1,
    provider: str = "cpu",
    arrays: Arrays = NO_ARRAYS,
    is_trial: bool = False,
) -> Any:
    """A session of a serialised graph whose weights are in `folder` or `arrays`, on one of `providers_for`.

    `threads`: of ONNX Runtime's own; our kernels have theirs.
    `is_trial`: the graph is not optimised, nor are its weights packed. Raises CapabilityError for a provider that lacks
    an operator of this model, ModelFileError for a bad model.
    """
    ort, options = library(), library().SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = ERRORS_ONLY + 1
    entries = {"session.model_external_initializers_file_folder_path": str(folder)}
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
        with _given(graph, arrays, options) if arrays else nullcontext(graph) as made:
            session = ort.InferenceSession(made, options, providers=[PROVIDERS[provider]])
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
    read = {name for node in model.graph.node for name in node.input}  # of the first layers alone, not all tables are
    own = [tensor for tensor in model.graph.initializer if tensor.name in arrays and tensor.name in read]
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
    """What the passes of a model read and write, by their shapes, in `session`; and what ends them (`set`)."""

    def __init__(self, session: Any) -> None:
        self.session, self.options = session, run_options()
        self._made: dict[tuple[int, ...], Any] = {}

    def is_set(self) -> bool:
        return bool(self.options.terminate)

    def set(self) -> None:
        self.options.terminate = True

    def clear(self) -> None:
        self.options.terminate = False

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
        with Translated(self.options):
            self.session.run_with_iobinding(binding, self.options)
            if on_device:
                binding.synchronize_outputs()  # else the cache may be read before the device has written it

    def close(self) -> None:
        self._made.clear()
        del self.session


Inputs = dict[str, tuple[tuple[int, ...], NDArray[Any]]]  # by name, the shape and the array that it begins in


def bind_inputs(binding: Any, inputs: Inputs) -> None:
    for name, (shape, array) in inputs.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)


class SessionEngine(BookedEngine):
    """One ONNX model. Logits stay valid until the next `forward`."""

    states_of = "all rows"  # they are taken before the head keeps those whose logits are wanted

    def __init__(
        self,
        session: Any,
        source: GraphSource,
        graph: Graph,
        settings: OnnxSettings,
        vocabulary: Vocabulary,
        sizes: tuple[int, int],
        kinds: tuple[object, ...],
        **facts: Any,
    ) -> None:
        """`sizes`: most rows of a pass, and of those with logits; `kinds`: of keys and values, for saved states."""
        self._bindings = self._cancel = Bindings(session)
        self.settings, self.vocabulary = settings, vocabulary
        rows, self._max_outputs = sizes
        self._logits = np.zeros((self._max_outputs, graph.vocabulary_size), np.float32)
        self._hidden = np.zeros((rows, graph.hidden_size or 0), np.float32)
        self._last_states = self._hidden[:0]  # of the last batch's rows
        self._book = SequenceBook(settings.max_sequences)
        self._held = HeldFiles(source.mapped)
        self._stamp = StateStamp.of("onnx", source.files, version(), settings.provider, *kinds)
        self.facts = EngineFacts(
            name="onnx",
            architecture=settings.architecture,
            context_length=settings.context_length,
            max_sequences=settings.max_sequences,
            can_rollback=True,
            weight_bytes=source.weight_bytes(graph),
            device=settings.provider,
            threads=settings.threads,
            own_cells=True,
            **facts,
        )

    def _bind_results(self, binding: Any, width: int, count: int) -> None:
        """Logits of `count` rows, and hidden states of all `width` where the graph gives them."""
        for name, rows, array in ((LOGITS, count, self._logits), (HIDDEN, width, self._hidden)):
            if array.size:
                shape = 1, rows, array.shape[1]
                binding.bind_output(name, "cpu", 0, np.float32, shape, array.ctypes.data)

    def give_hidden_states(self, wanted: bool) -> None:
        """As in the base class; a graph that has them as an output computes them in every pass, at no cost."""
        self._require_open()
        if wanted and not self._hidden.size:
            raise CapabilityError("this model was loaded without hidden states: load it with hidden_states=True")

    def hidden_states(self) -> NDArray[np.float32]:
        self._require_open()
        return self._last_states if self._hidden.size else super().hidden_states()

    def _free(self) -> None:
        self._held.close()
        self._bindings.close()


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

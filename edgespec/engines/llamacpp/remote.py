"""llama.cpp's RPC: a model on the devices of servers, and serving devices.

The model runs in a child process, because ggml ends a process whose RPC server is lost. With a child all texts that are
cached in it are lost: their sequences are empty then, and must be rolled back to 0 before they are used again, as
`CachedSequence.reconcile` does. The next call starts another child, which loads the model again.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn, Self, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.contained import Child, ChildEnded
from edgespec.engines.base import Engine, EngineFacts, check_threads
from edgespec.engines.booked import BookedEngine, SequenceBook, SequenceRows
from edgespec.engines.llamacpp.devices import devices, function, gpus, handles_of
from edgespec.engines.llamacpp.library import CancelFlag, library, logger
from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.engines.model_files import StateStamp
from edgespec.engines.model_use import ModelUse
from edgespec.errors import Cancelled, CapabilityError, StateError, Unreachable
from edgespec.formats.gguf.check import model_files
from edgespec.installation import build_command
from edgespec.types import Batch, Logits

TIMEOUT_S = 3.0
# The beginning of ggml's protocol (ggml-rpc.cpp): a command, the size of what follows, and no capabilities beyond TCP;
# the size of an answer to it.
_HELLO, _ANNOUNCED = struct.pack("<BQ24x", 14, 24), struct.pack("<Q", 28)


def ask(endpoint: str, timeout_s: float = TIMEOUT_S) -> None:
    """Raises Unreachable, with the reason and the fix, where no RPC server answers at `endpoint`.

    Asked before llama.cpp connects: it would wait for a busy server for ever, and end the process where one is lost.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(_HELLO)
            if connection.makefile("rb").read(8) != _ANNOUNCED:
                raise ConnectionError("what answers there is no RPC server of a matching version of llama.cpp")
    except OSError as exc:
        why, fix = exc.strerror or str(exc), "check the address, and that edgespec rpc-server runs there"
        if isinstance(exc, TimeoutError):
            why = f"no answer within {timeout_s:g} s"
            fix = "a server takes one program at a time: end the other one, or start the server again if it hangs"
        raise Unreachable(f"the RPC server {endpoint} does not answer: {why}. Fix: {fix}") from exc


def require_rpc(what: str) -> None:
    """Raises CapabilityError, with the command that builds it, where llama.cpp has no RPC backend."""
    if not library().llama_supports_rpc():
        raise CapabilityError(
            f"{what} needs llama.cpp with its RPC backend, which this build does not have. Build it (4 to 10 minutes "
            f"on two cores): {build_command('rpc')}"
        )


def add_servers(endpoints: Sequence[str]) -> None:
    """Add the devices of RPC servers to those of this process.

    ggml ends the process where one does not answer, now or later: call it in a child process. Raises CapabilityError.
    """
    require_rpc("--rpc")
    add = _rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    register = function("ggml_backend_register", None, ctypes.c_void_p)
    for endpoint in endpoints:
        added = add(endpoint.encode())
        if not added:
            raise CapabilityError(f"the RPC server {endpoint} offers no device")
        register(added)


def serve_rpc(endpoint: str, *, threads: int, names: Sequence[str], cache_folder: Path | None) -> None:
    """Serve devices to one client after another, until the process ends. Returns where that fails.

    `names`: of devices; none: the GPUs, or the CPU where there are none. `cache_folder`: where received weights
    are stored. Raises CapabilityError.
    """
    require_rpc("an RPC server")
    chosen = names or [device.name for device in gpus()] or [devices()[0].name]
    handles = handles_of(chosen)
    place = None if cache_folder is None else str(cache_folder).encode()
    start = _rpc_function(
        "ggml_backend_rpc_start_server",
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    )
    start(endpoint.encode(), place, threads, len(handles), (ctypes.c_void_p * len(handles))(*handles))


def _rpc_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the RPC backend, which gives its address itself: it may be a library of its own."""
    backend = function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")
    address = function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    found = address(backend, name.encode())
    if not found:
        raise CapabilityError(f"this build of llama.cpp has no {name}; build another: {build_command('rpc')}")
    return ctypes.CFUNCTYPE(result, *arguments)(found)


CANCEL_S = 4.0  # a pass that was cancelled and still runs then waits for a server that hangs


class RemoteEngine(BookedEngine):
    """A GGUF model on RPC servers. Make it with `load`. Logits stay valid until the next `forward`.

    Every method raises Unreachable when a server is lost, after which the engine can be used again: whatever needs the
    servers connects to them first.
    """

    vocabulary: VocabularyFile

    def __init__(self, path: Path, use: ModelUse) -> None:
        self._path, self._use = path, use
        self.state_layers = use.state_layers
        self._child: Child | None = None
        self._book = SequenceBook(use.max_sequences)
        self._lost: set[int] = set()  # sequences whose tokens were in a child that is gone
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flag = Path(self._folder.name, "cancel")
        flag.write_bytes(bytes(2))
        self._cancel, self._flag, self._cancelled_s = CancelFlag(flag), flag, 0.0
        try:
            self.facts = self._start()
            self._stamp = StateStamp.of("llamacpp over RPC", model_files(path), self.facts.kv_bytes_per_token)
            self.vocabulary = VocabularyFile(path)
        except BaseException:
            self._drop_child()
            self._folder.cleanup()
            raise

    @classmethod
    def load(cls, path: Path, use: ModelUse | None = None, **changes: Any) -> Self:
        """Load `path` onto the servers of `use`; `changes`: of it.

        Without servers the child computes itself. Raises what `LlamaCppEngine.load` does, Unreachable for a server that
        does not answer, and CapabilityError where this build of llama.cpp has no RPC.
        """
        use = replace(use or ModelUse(), **changes)
        if use.endpoints:
            require_rpc("--rpc")
        return cls(path, use)

    def _start(self) -> EngineFacts:
        """Load the model in a new child; its facts. Raises as `load`."""
        for endpoint in self._use.endpoints:
            ask(endpoint)
        self._child, self._gives_states = Child(__name__), False  # who asks for a pass says again what it wants
        return cast(EngineFacts, self._ask(_load, self._path, self._use, self._flag))

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine in the child; in another one if it was lost."""
        self._require_open()
        if self._child is None:
            self._start()
        return self._ask(_call, method, *arguments)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        child = self._child
        assert child is not None
        try:
            return child.call(function, *arguments, look=self._require_progress)
        except ChildEnded as exc:
            self._raise_lost(exc)
        finally:
            if not child.is_alive:  # an interrupt has ended it, too
                self._drop_child()

    def _require_progress(self) -> None:
        """Raises ChildEnded where a cancelled pass goes on because a server hangs."""
        if self._cancel.is_set() and monotonic() > self._cancelled_s + CANCEL_S:
            raise ChildEnded("cancelled", "its server hangs")

    def _raise_lost(self, ended: ChildEnded) -> NoReturn:
        self._drop_child()
        if self._cancel.is_set():
            self._cancel.clear()
            raise Cancelled("the pass was cancelled, and its process was ended") from ended
        raise Unreachable(
            f"the process with the target ended ({ended}): the next answer loads the model again, and names an RPC "
            "server that does not answer"
        ) from ended

    def _drop_child(self) -> None:
        if self._child is None:
            return
        self._child.close()
        self._child = None
        lengths = self._book.lengths
        self._lost |= {sequence for sequence, length in enumerate(lengths) if length}
        for sequence in range(len(lengths)):
            self._book.settle(sequence, 0)

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        if self._lost & placed.keys():
            raise Unreachable("the text was lost with the process that held it: it has to be read again")
        return cast(Logits, self._call("forward", batch))

    def _truncate(self, to_length: int, sequence: int) -> None:
        self._lost.discard(sequence)
        if self._child is not None:
            self._call("rollback", to_length, sequence)

    def checkpoint(self, sequence: int = 0) -> None:
        if self.facts.has_checkpoints and self.length(sequence):
            self._call("checkpoint", sequence)

    def reachable(self, to_length: int, sequence: int = 0) -> int:
        if self._child is None or (self.facts.can_rollback and not self.facts.state_window):
            return super().reachable(to_length, sequence)
        return cast(int, self._call("reachable", to_length, sequence))

    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        self._call("keep_path", tuple(part.rows[place] for place in path), sequence)

    def _copy(self, source: int, destination: int) -> None:
        self._lost.discard(destination)
        self._call("fork", source, destination)

    def _state(self, sequence: int) -> bytes:
        return cast(bytes, self._call("save_state", sequence))

    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        self._lost.discard(sequence)
        try:
            self._call("load_state", bytes(state), sequence)
        except StateError:
            self._drop_child()  # the library may have emptied the sequence
            raise

    def give_hidden_states(self, wanted: bool) -> None:
        self._require_open()
        if wanted != self._gives_states:
            self._call("give_hidden_states", wanted)
            self._gives_states = wanted

    def hidden_states(self) -> NDArray[np.float32]:
        return cast(NDArray[np.float32], self._call("hidden_states"))

    def drop_class(self) -> None:
        super().drop_class()
        self._use = replace(self._use, reproducible=False)  # for a later child
        if self._child is not None:
            self._call("drop_class")

    def set_threads(self, threads: int) -> bool:
        self._require_open()
        check_threads(threads, self.facts)
        return False  # the servers' threads are theirs

    def cancel(self) -> None:
        self._cancelled_s = monotonic()
        super().cancel()

    def _free(self) -> None:
        self._drop_child()
        self.vocabulary.close()
        self._folder.cleanup()


# -- in the child

_engine: Engine | None = None


def _load(path: Path, use: ModelUse, flag: Path) -> EngineFacts:
    """Load the model at `path`, on the devices of the servers of `use`. Raises as `LlamaCppEngine.load`."""
    from edgespec.engines.llamacpp.engine import LlamaCppEngine

    global _engine
    logger.setLevel(logging.DEBUG)  # should ggml end this process, its last lines say why
    logger.addHandler(logging.StreamHandler())
    library()
    if use.endpoints:
        add_servers(use.endpoints)
    _engine = LlamaCppEngine.load(path, use, CancelFlag(flag))
    return _engine.facts


def _call(method: str, *arguments: Any) -> Any:
    return getattr(_engine, method)(*arguments)

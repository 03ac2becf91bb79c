"""The only module that imports llama_cpp: loads the library, collects its error messages, cancels passes.

llama.cpp reports why something failed only through its log callback, so its last error messages are kept here for the
typed error that the caller gets.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.errors import Cancelled, ContextFull, EngineError, StateError
from edgespec.installation import IMPORT_FAILURES, interrupts_deferred, not_importable, require_engine

logger = logging.getLogger(__name__)
ERROR, CONTINUED = 4, 5  # ggml_log_level
_complaints: deque[str] = deque(maxlen=8)
NO_ROOM, ABORTED = 1, 2  # results of llama_decode and llama_encode
END = -1  # of a range of positions: to its end
_worker = 0  # the process that made the first context


@cache
def library() -> Any:
    """The module `llama_cpp.llama_cpp`, with its log turned off. Raises CapabilityError when it is not installed."""
    # On a failed assertion ggml otherwise starts a debugger to print a backtrace, which can take minutes.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        from llama_cpp import llama_cpp
    except IMPORT_FAILURES as exc:
        require_engine("llamacpp", "this command")
        raise not_importable("a GGUF file", exc, "llama-cpp-python") from exc
    llama_cpp.llama_log_set(_log_callback(llama_cpp), None)
    llama_cpp.llama_backend_init()
    return llama_cpp


def require_threads() -> None:
    """To be called before a context is made. Raises StateError in a fork of a process that had one.

    The library goes on as if its threads were there, and the first pass never ends.
    """
    global _worker
    _worker = _worker or os.getpid()
    if _worker != os.getpid():
        raise StateError(
            "this process was forked from one that had used llama.cpp, whose threads are not in the fork: start it "
            "without forking (multiprocessing: spawn or forkserver), or load no GGUF file before the fork"
        )


@cache
def has_cuda() -> bool:
    """Whether the installed build has a backend for CUDA, as its files tell; the library is not loaded for it."""
    return _has_backend("cuda")


@cache
def has_gpu() -> bool:
    """Whether the installed build has a backend for GPUs, and this machine a GPU for it."""
    if not any(map(_has_backend, ("cuda", "metal", "hip", "vulkan"))):
        return False  # the library is not loaded to find out
    from edgespec.engines.llamacpp.devices import gpus

    return bool(gpus())


def _has_backend(name: str) -> bool:
    found = find_spec("llama_cpp")
    places = found.submodule_search_locations if found is not None else None
    return any(any(Path(place, "lib").glob(f"*ggml-{name}*")) for place in places or ())


@cache
def version() -> str:
    """Version of llama-cpp-python, which pins the version of llama.cpp."""
    from importlib.metadata import version as installed

    return installed("llama-cpp-python")


@cache
def _log_callback(llama_cpp: Any) -> Any:
    def keep(level: int, text: bytes | None, _data: Any) -> None:
        line = (text or b"").decode("utf-8", errors="replace").rstrip()
        if level == ERROR and line:
            _complaints.append(" ".join(line.replace("====", "").split()))
        if line and level != CONTINUED:
            logger.debug("%s", line)

    return llama_cpp.llama_log_callback(keep)


def check_pass(result: int, cancel: CancelFlag, what: str) -> None:
    """Raise what a `result` of llama_decode or llama_encode says of the pass `what`; 0 is none."""
    if result == ABORTED:
        cancel.clear()
        raise Cancelled(f"{what} was cancelled; the cache is as before")
    if result == NO_ROOM:
        raise ContextFull(f"the KV cache has no room for {what}. Give a larger --ctx-size")
    if result:
        raise EngineError(f"llama.cpp failed on {what} (result {result}): {complaints()}")


def forget_complaints() -> None:
    _complaints.clear()


def complaints() -> str:
    """What the library logged as errors since `forget_complaints`, oldest first, in one line."""
    return "; ".join(dict.fromkeys(_complaints)) or "the library gives no reason"


def uninterrupted(call: Callable[[], Any], free: Callable[[Any], object]) -> Any:
    """Returns `call()`, deferring Ctrl-C until it is done; if the handler then raises, the result is freed.

    These calls log a lot, and Python drops an exception that is raised inside a callback such as the log's.
    """
    found = None
    try:
        with interrupts_deferred():
            found = call()
    except BaseException:
        if found:
            free(found)
        raise
    return found


class CancelFlag:
    """A byte that llama.cpp reads between operations of a pass, and that any thread may set.

    The abort callback is libc's `strlen` over this byte and a zero: 0 goes on, 1 ends the pass. A Python function
    would need the interpreter lock about 140 times per token.
    """

    def __init__(self, shared: Path | None = None) -> None:
        """`shared`: a file of two bytes that another process may set as well."""
        memory: bytearray | mmap.mmap = bytearray(2)
        if shared is not None:
            with shared.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 2)
        self._bytes = (ctypes.c_char * 2).from_buffer(memory)

    def is_set(self) -> bool:
        return self._bytes.raw[0] != 0

    def set(self) -> None:
        self._bytes[0] = b"\x01"

    def clear(self) -> None:
        self._bytes[0] = b"\x00"

    @property
    def callback(self) -> Any:
        libc = ctypes.CDLL("msvcrt") if sys.platform == "win32" else ctypes.CDLL(None)
        return ctypes.cast(libc.strlen, library().ggml_abort_callback)

    @property
    def callback_data(self) -> ctypes.c_void_p:
        return ctypes.cast(self._bytes, ctypes.c_void_p)

"""The only module that imports llama_cpp: loads the library, collects its error messages, cancels passes.

llama.cpp reports why something failed only through its log callback, so its last error messages are kept here for the
typed error that the caller gets.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.gguf.split import model_files
from edgespec.installation import reinstall_command, require_engine

logger = logging.getLogger(__name__)
ERROR, CONTINUED = 4, 5  # ggml_log_level
_complaints: deque[str] = deque(maxlen=8)
_listeners: list[Callable[[str], None]] = []
_NO_MEMORY = ("allocate memory", "Resource temporarily unavailable", "bad_alloc", "failed to allocate")
_opened = 0  # models in this process


@cache
def library() -> Any:
    """The module `llama_cpp.llama_cpp`, with its log turned off. Raises CapabilityError when it is not installed."""
    # On a failed assertion ggml otherwise starts a debugger to print a backtrace, which can take minutes.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        from llama_cpp import llama_cpp
    except (ImportError, OSError, RuntimeError) as exc:
        require_engine("llamacpp", "this command")
        raise CapabilityError(
            f"llama.cpp cannot be loaded: {exc}. Install it again: {reinstall_command('llama-cpp-python')}"
        ) from exc
    llama_cpp.llama_log_set(_log_callback(llama_cpp), None)
    llama_cpp.llama_backend_init()
    return llama_cpp


def is_loaded() -> bool:
    return library.cache_info().currsize > 0


def has_worked() -> bool:
    """Whether a model was opened in this process, after which the library has threads."""
    return _opened > 0


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
            for listener in tuple(_listeners):
                listener(line)

    return llama_cpp.llama_log_callback(keep)


def forget_complaints() -> None:
    _complaints.clear()


def complaints() -> str:
    """What the library logged as errors since `forget_complaints`, oldest first, in one line."""
    return "; ".join(dict.fromkeys(_complaints)) or "the library gives no reason"


@contextlib.contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Pass each line that the library logs to `listener`, which must not raise and may be called from any thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def open_model(path: Path, *, gpu_layers: int = 0, vocabulary_only: bool = False, check_tensors: bool = False) -> Any:
    """Load a model that passed `check_gguf`, with its shards. Raises ModelFileError with the library's own reason."""
    global _opened
    llama = library()
    _opened += 1
    params = llama.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    params.vocab_only = vocabulary_only
    params.check_tensors = check_tensors
    forget_complaints()
    files = [os.fsencode(file) for file in model_files(path)]
    if len(files) > 1:
        model = llama.llama_model_load_from_splits((ctypes.c_char_p * len(files))(*files), len(files), params)
    else:
        model = llama.llama_model_load_from_file(files[0], params)
    if not model and any(sign in complaints() for sign in _NO_MEMORY):
        raise CapabilityError(f"{path.name} needs more memory than there is ({complaints()}). Use a smaller model")
    if not model:
        raise ModelFileError(f"{path} cannot be loaded by llama.cpp: {complaints()}. Download or export it again")
    return model


class CancelFlag:
    """A byte that llama.cpp reads between operations of a pass, and that any thread may set.

    The abort callback is libc's `strlen` over this byte and a zero: 0 goes on, 1 ends the pass. A Python function
    would need the interpreter lock about 140 times per token.
    """

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(2)

    @property
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

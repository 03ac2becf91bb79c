"""ggml's devices: what this build can compute on, and the functions of its RPC backend.

ggml's own functions are not part of llama-cpp-python's bindings. They are looked up in the library that the bindings
loaded, which finds those of the libraries it needs as well, except on Windows, where each is asked for itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from edgespec.engines.llamacpp.library import library
from edgespec.errors import CapabilityError
from edgespec.installation import install_command
from edgespec.platform.machine import is_apple_silicon

_KINDS = ("cpu", "gpu", "integrated gpu", "accelerator")  # ggml_backend_dev_type
_PARTS = ("ggml-base", "ggml", "ggml-rpc")  # of the library, where Windows looks into each


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `name` as `--device` takes it; memory in bytes, 0 where the driver does not tell."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int

    @property
    def is_gpu(self) -> bool:
        return "gpu" in self.kind

    @property
    def shares_memory(self) -> bool:
        """Whether what lies on it takes this machine's memory: of Apple Silicon's GPU, which ggml calls a plain one."""
        return "integrated" in self.kind or (self.is_gpu and is_apple_silicon())


@cache
def function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml. Raises CapabilityError where this build does not export it."""
    exports = library()._lib
    found = getattr(exports, name, None)
    if found is None:
        folder = Path(exports._name).parent
        parts = (folder / f"{part}.dll" for part in _PARTS)
        libraries = (ctypes.CDLL(str(part)) for part in parts if part.is_file())
        found = next(filter(None, (getattr(each, name, None) for each in libraries)), None)
    if found is None:
        raise CapabilityError(f"this build of llama.cpp does not export {name}: {install_command('llamacpp')}")
    found.restype, found.argtypes = result, list(arguments)
    return found


def devices() -> list[Device]:
    """All devices of this build, the CPU among them. Raises CapabilityError where it cannot be asked."""
    return [_described(handle) for handle in _handles()]


def gpus() -> list[Device]:
    """The devices that layers can be placed on."""
    return [device for device in devices() if device.is_gpu]


def any_shares_memory(names: Sequence[str] | None) -> bool:
    """Whether one of the GPUs `names` (None: all) shares this machine's memory."""
    return any(device.shares_memory for device in gpus() if names is None or device.name in names)


def handles_of(names: Sequence[str]) -> list[int]:
    """ggml's handles of the devices `names`. Raises CapabilityError that lists the known ones."""
    known = {_described(handle).name: handle for handle in _handles()}
    for name in names:
        if name not in known:
            raise CapabilityError(f"there is no device {name!r}; this build of llama.cpp sees: {', '.join(known)}")
    return [known[name] for name in names]


def _handles() -> list[int]:
    get = function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return [get(index) for index in range(function("ggml_backend_dev_count", ctypes.c_size_t)())]


def _described(handle: int) -> Device:
    texts = [
        function(f"ggml_backend_dev_{what}", ctypes.c_char_p, ctypes.c_void_p)(handle).decode(errors="replace")
        for what in ("name", "description")
    ]
    kind = function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    pointer = ctypes.POINTER(ctypes.c_size_t)
    function("ggml_backend_dev_memory", None, ctypes.c_void_p, pointer, pointer)(handle, free, total)
    known = _KINDS[kind] if 0 <= kind < len(_KINDS) else "other"
    return Device(texts[0], texts[1], known, free.value, total.value)


def backends() -> list[str]:
    """Names of the backends in this build, as ggml spells them: CPU, CUDA, Metal, RPC, Vulkan, ..."""
    count = function("ggml_backend_reg_count", ctypes.c_size_t)()
    get = function("ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t)
    name_of = function("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    return [name_of(get(index)).decode(errors="replace") for index in range(count)]

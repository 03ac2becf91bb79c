"""ggml's devices: what this build can compute on, how much room they have, and what layers of a GGUF take there.

ggml's own functions are not part of llama-cpp-python's bindings. They are looked up in the library that the bindings
loaded, which finds those of the libraries it needs as well, except on Windows, where each is asked for itself.

llama.cpp counts the head as a layer behind the last one and takes layers from the end, so `-ngl 1` places the head
alone and `-ngl N` the head and the last N - 1 layers (llama_model::load_tensors). The embeddings stay on the CPU;
a head that is tied to them is copied. Results of a pass have a buffer of their own on every device.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from edgespec.config.values import CPU, TensorOverrides
from edgespec.engines.llamacpp.library import library
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.header import GgufHeader
from edgespec.installation import install_command
from edgespec.platform.machine import is_apple_silicon
from edgespec.platform.memory import free_memory

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


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override"""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def overriding(overrides: TensorOverrides) -> ctypes.Array[_Override] | None:
    """What llama.cpp takes for these. Raises CapabilityError for a device that is not there."""
    if not overrides:
        return None
    buffer_type = function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
    names = sorted({name for _, name in overrides})
    kinds = {name: buffer_type(handle) for name, handle in zip(names, handles_of(names), strict=True)}
    pairs = [_Override(os.fsencode(pattern), kinds[name]) for pattern, name in overrides]
    return (_Override * (len(pairs) + 1))(*pairs)  # ends with nulls


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


LAYER = re.compile(r"blk\.(\d+)\.")
EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"
# Left free on a device: the driver's own, and what other programs take meanwhile.
MARGIN_SHARE, LEAST_MARGIN = 0.05, 256 << 20


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes: weights of the `head` and of each of the `layers`, and a layer's part of the `cache`.

    `visiting`: the largest tensor that stays on the processor against its layer. llama.cpp copies it to the device for
    wide passes, as a prompt's.
    """

    head: int
    layers: tuple[int, ...]
    cache: int
    visiting: int = 0

    @classmethod
    def of(cls, header: GgufHeader, layers: int, cache_bytes: int, overrides: TensorOverrides = ()) -> LayerSizes:
        """`layers`: how many the model has; `cache_bytes` of all of them."""
        weights, moved, visiting = [0] * layers, 0, 0
        head: dict[str, int] = {}
        for tensor in header.tensors:
            found = LAYER.match(tensor.name)
            device = next((device for pattern, device in overrides if re.search(pattern, tensor.name)), "")
            if device == CPU:
                visiting = max(visiting, tensor.num_bytes)
            elif device:
                moved += tensor.num_bytes
            elif not found:
                head[tensor.name] = tensor.num_bytes
            elif int(found[1]) < layers:
                weights[int(found[1])] += tensor.num_bytes
        if any(tensor.name == HEAD for tensor in header.tensors):
            head.pop(EMBEDDINGS, None)
        return cls(sum(head.values()) + moved, tuple(weights), cache_bytes // max(layers, 1), visiting)

    def weights_on(self, gpu_layers: int) -> int:
        """Bytes of weights on the device. `gpu_layers` as llama.cpp counts them, -1: all."""
        return self.head + sum(self.layers[len(self.layers) - self._blocks(gpu_layers) :]) if gpu_layers else 0

    def cache_on(self, gpu_layers: int) -> int:
        """Bytes of the cache of the layers there."""
        return self._blocks(gpu_layers) * self.cache

    def _blocks(self, gpu_layers: int) -> int:
        return len(self.layers) if gpu_layers < 0 else max(min(gpu_layers - 1, len(self.layers)), 0)


def room_on_devices(names: Sequence[str] | None) -> int:
    """Bytes that models may take on the devices `names` together; None: on all GPUs of this build.

    Raises CapabilityError for one whose driver does not tell its memory. The load names a device that is not there.
    """
    return sum(_room_on(device) for device in gpus() if names is None or device.name in names)


def _room_on(device: Device) -> int:
    if not device.total_bytes:
        raise CapabilityError(
            f"the driver of {device.name} does not report its memory: give the number of layers (-ngl)"
        )
    free = device.free_bytes
    if device.shares_memory:  # Metal tells how much it may use of what the machine has, not what is left of it
        free = min(free, free if (left := free_memory()) is None else left)
    return max(free - max(int(MARGIN_SHARE * device.total_bytes), LEAST_MARGIN), 0)

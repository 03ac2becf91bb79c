"""What layers of a GGUF take on a device, and how much room devices have.

llama.cpp counts the head as a layer behind the last one and takes layers from the end, so `-ngl 1` places the head
alone and `-ngl N` the head and the last N - 1 layers (llama_model::load_tensors). The embeddings stay on the CPU;
a head that is tied to them is copied. Results of a pass have a buffer of their own on every device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.engines.llamacpp.devices import Device, gpus
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.header import GgufHeader
from edgespec.platform.memory import free_memory

LAYER = re.compile(r"blk\.(\d+)\.")
EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"
# Left free on a device: the driver's own, and what other programs take meanwhile.
MARGIN_SHARE, LEAST_MARGIN = 0.05, 256 << 20


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes: weights of the `head` and of each of the `layers`, and a layer's part of the `cache`."""

    head: int
    layers: tuple[int, ...]
    cache: int

    @classmethod
    def of(cls, header: GgufHeader, layers: int, cache_bytes: int) -> LayerSizes:
        """`layers`: how many the model has; `cache_bytes` of all of them."""
        weights = [0] * layers
        head = {tensor.name: tensor.num_bytes for tensor in header.tensors if not LAYER.match(tensor.name)}
        for tensor in header.tensors:
            found = LAYER.match(tensor.name)
            if found and int(found[1]) < layers:
                weights[int(found[1])] += tensor.num_bytes
        if HEAD in head:
            head.pop(EMBEDDINGS, None)
        return cls(sum(head.values()), tuple(weights), cache_bytes // max(layers, 1))

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

    Raises CapabilityError for an unknown device, or one whose driver does not tell its memory.
    """
    known = gpus()
    if names is not None:
        missing = [name for name in names if name not in {device.name for device in known}]
        if missing:
            raise CapabilityError(
                f"there is no GPU {missing[0]!r}; this build of llama.cpp sees: "
                f"{', '.join(device.name for device in known) or 'none'}"
            )
        known = [device for device in known if device.name in names]
    return sum(map(_room_on, known))


def _room_on(device: Device) -> int:
    if not device.total_bytes:
        raise CapabilityError(
            f"the driver of {device.name} does not report its memory: give the number of layers (-ngl)"
        )
    free = device.free_bytes
    if device.shares_memory:  # Metal tells how much it may use of what the machine has, not what is left of it
        free = min(free, free if (left := free_memory()) is None else left)
    return max(free - max(int(MARGIN_SHARE * device.total_bytes), LEAST_MARGIN), 0)

"""`-ngl auto`: as many layers of the target on the GPU as its free memory holds, then the draft if it fits beside them.

The target comes first, regardless of the draft: a text must not depend on whether there was room for a draft. What is
not placed on a device runs on the CPU, so target and draft may be on different ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

from edgespec.config import LoadOptions
from edgespec.engines.llamacpp.library import has_gpu
from edgespec.formats.manifest import ModelPair
from edgespec.memory.plan import planned

MOST_LAYERS = 512  # of llama.cpp
Room = Callable[[Sequence[str] | None], int]


def placed(options: LoadOptions, pair: ModelPair, room: Room | None = None) -> LoadOptions:
    """`options` with numbers of layers in place of "auto"; `room`: bytes on devices, None: what they report as free.

    Raises CapabilityError for a device that is missing or does not report its memory, and as `planned`.
    """
    if options.gpu_layers is None and _goes_to_gpu(options, pair):
        options = replace(options, gpu_layers="auto")
    if options.gpu_layers != "auto":
        return options
    if pair.files["target"].engine != "llamacpp" or options.target_devices == ():
        return _with(options, 0, 0)
    if options.rpc is not None:  # llama.cpp splits the layers by the servers' free memory
        return _with(options, -1, 0)
    from edgespec.engines.llamacpp.placement import room_on_devices

    free = (room or room_on_devices)(options.target_devices)

    def needed(layers: int, draft_layers: int) -> list[int]:
        """Bytes on devices, of the target and of each draft."""
        plan = planned(_with(options, layers, draft_layers), pair)
        return [model.footprint.device for model in plan.models]

    every, *drafts = needed(-1, -1)
    if _is_said(options) and options.draft_devices == options.target_devices:
        free, drafts = free - sum(drafts), []
    if every <= free:
        return _with(options, -1, -1 if every + sum(drafts) <= free else 0)
    return _with(options, bisect_right(range(MOST_LAYERS), free, key=lambda layers: needed(layers, 0)[0]) - 1, 0)


def _goes_to_gpu(options: LoadOptions, pair: ModelPair) -> bool:
    """Whether layers go to the GPU where nobody says how many."""
    is_free = not (options.reproducible or options.rpc or options.device)
    return is_free and pair.files["target"].engine == "llamacpp" and has_gpu()


def _with(options: LoadOptions, layers: int, draft_layers: int | None) -> LoadOptions:
    """`options` with these numbers instead of "auto", for the draft unless the user placed it."""
    draft_layers = options.draft_gpu_layers if _is_said(options) else draft_layers
    return replace(options, gpu_layers=layers, draft_gpu_layers=draft_layers)


def _is_said(options: LoadOptions) -> bool:
    """Whether the user placed the draft."""
    return options.draft_gpu_layers is not None or options.draft_device is not None

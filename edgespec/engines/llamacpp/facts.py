"""Facts about a loaded model: read from the library, then measured with a few passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.engines.base import Engine, EngineFacts
from edgespec.engines.llamacpp.devices import gpus
from edgespec.engines.llamacpp.library import library, version
from edgespec.engines.llamacpp.settings import ContextSettings
from edgespec.engines.widths import METHOD, PREFIX, pinned_facts
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.check import model_files, pooling_of
from edgespec.formats.gguf.header import GgufHeader
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.types import Batch


def read_facts(model: Any, header: GgufHeader, settings: ContextSettings, context: Any = None) -> EngineFacts:
    """The facts that need no pass. `context`: None for a model that keeps no cache."""
    llama = library()
    placement = _placement(settings)
    return EngineFacts(
        name="llamacpp",
        architecture=header.architecture,
        context_length=settings.context_length,
        max_sequences=settings.max_sequences,
        max_batch=min(settings.max_batch, llama.llama_n_batch(context)) if context else settings.max_batch,
        can_rollback=not settings.keeps_state,
        rollback_rows=int(llama.llama_n_rs_seq(context)) if settings.keeps_state else 0,
        has_checkpoints=settings.keeps_state,
        state_window=int(llama.llama_model_n_swa(model)),
        max_branches=settings.max_branches,
        weight_bytes=int(llama.llama_model_size(model)),
        kv_bytes_per_token=0,
        pinned_class=None,
        device=settings.place,
        threads=settings.threads,
        can_pack=settings.max_sequences > 1,
        splits_passes=settings.max_sequences > 1 and (settings.streams or settings.keeps_state),
        own_cells=settings.streams,
        pooling=pooling_of(header),
        placement=" ".join(map(str, (settings.gpu_layers, *placement))) if placement else "",
    )


def measured_facts(engine: Engine, path: Path, settings: ContextSettings, state_size: Callable[[], int]) -> EngineFacts:
    """The facts of an empty engine, which is left empty.

    Raises CapabilityError when it cannot be reproducible: of a running state, which cannot be rolled back, no width
    class can be proved.
    """
    if settings.reproducible and settings.keeps_state:
        raise CapabilityError(
            f"{path.name} cannot be reproducible: {engine.facts.architecture} models keep a running state, whose bits "
            "depend on how many tokens a pass has. Use --no-reproducible"
        )
    sizes = []
    for _ in range(2):
        engine.forward(Batch.chain([0]))
        sizes.append(state_size())
    engine.rollback(0)
    engine.facts = replace(engine.facts, kv_bytes_per_token=sizes[1] - sizes[0])
    if not settings.reproducible:
        return engine.facts
    advice = f"Use a Q8_0 file in place of {path.name}, or --no-reproducible"
    return pinned_facts(engine, _widths_key(path, settings), widest=settings.widest, advice=advice)


def _widths_key(path: Path, settings: ContextSettings) -> str:
    """The cache key: files, machine, library and settings."""
    kernels = (
        settings.threads,
        settings.gpu_layers,
        settings.cache_type_k,
        settings.cache_type_v,
        *_placement(settings),
    )
    measured = (settings.flash_attention_type, settings.widest, settings.context_length > PREFIX + settings.widest)
    files = tuple(map(file_key, model_files(path)))
    return key_of(METHOD, files, version(), library().llama_print_system_info(), kernels, measured)


def _placement(settings: ContextSettings) -> tuple[object, ...]:
    """The devices that compute layers other than the CPU's; empty if there are none."""
    if not settings.gpu_layers or settings.devices == ():
        return ()
    seen = tuple((device.name, device.description, device.total_bytes) for device in gpus())
    return seen, settings.devices, settings.endpoints, *settings.overrides

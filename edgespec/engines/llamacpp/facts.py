"""What a loaded model is and can do: read from the library, then measured with a few passes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.engines.base import Engine, EngineFacts
from edgespec.engines.llamacpp.library import library, version
from edgespec.engines.llamacpp.settings import ContextSettings
from edgespec.engines.measurements import file_key, key_of, recall, remember
from edgespec.engines.widths import METHOD, PREFIX, WidthClass, choose_class, measure_classes
from edgespec.errors import CapabilityError
from edgespec.types import Batch

WIDE_ENOUGH_FOR_PROMPTS = 32


def keeps_running_state(model: Any) -> bool:
    """Whether tokens cannot be taken back: recurrent caches refuse it, some hybrids agree and are silently wrong."""
    return bool(library().llama_model_is_recurrent(model) or library().llama_model_is_hybrid(model))


def read_facts(model: Any, context: Any, settings: ContextSettings) -> EngineFacts:
    """Everything but what only a pass can tell."""
    llama = library()
    can_rollback = not keeps_running_state(model)
    return EngineFacts(
        name="llamacpp",
        architecture=_metadata(model, "general.architecture"),
        context_length=settings.context_length,
        max_sequences=settings.max_sequences,
        max_batch=min(settings.max_batch, llama.llama_n_batch(context)),
        can_rollback=can_rollback,
        can_tree=can_rollback,
        weight_bytes=int(llama.llama_model_size(model)),
        kv_bytes_per_token=0,
        width_classes=(),
        pinned_class=None,
        device="gpu" if settings.gpu_layers else "cpu",
        threads=settings.threads,
    )


def measured_facts(engine: Engine, path: Path, settings: ContextSettings, state_size: Callable[[], int]) -> EngineFacts:
    """The facts of an empty engine, which is left empty. Raises CapabilityError when it cannot be reproducible."""
    empty_bytes = state_size()
    engine.forward(Batch.chain([0] * min(2, settings.max_batch)))
    per_token = (state_size() - empty_bytes) // engine.length()
    engine.rollback(0)
    facts = replace(engine.facts, kv_bytes_per_token=per_token)
    if settings.reproducible is False:
        return facts
    found = _classes(engine, path, settings) if facts.can_rollback else ()
    pinned = choose_class(found)
    if settings.reproducible and pinned is None:
        raise CapabilityError(
            f"{path.name} cannot be reproducible on this machine: its narrow passes give other bits at every width "
            f"(classes {list(found)}). Use a Q8_0 file, or --no-reproducible"
        )
    max_batch = facts.max_batch
    if pinned and pinned[1] >= WIDE_ENOUGH_FOR_PROMPTS:
        # With prompts read at pinned widths too, a cache's bits depend on its tokens alone and not on how they came.
        max_batch = min(max_batch, pinned[1])
    return replace(facts, width_classes=found, pinned_class=pinned, max_batch=max_batch)


def _classes(engine: Engine, path: Path, settings: ContextSettings) -> tuple[WidthClass, ...]:
    """Measured once per file, machine, library and settings."""
    kernels = (settings.threads, settings.gpu_layers, settings.cache_type_k, settings.cache_type_v)
    measured = (settings.flash_attention_type, settings.widest, settings.context_length > PREFIX + settings.widest)
    key = key_of(METHOD, file_key(path), version(), library().llama_print_system_info(), kernels, measured)
    kept = recall("widths", key)
    if kept is None:
        kept = measure_classes(engine, settings.widest)
        remember("widths", key, kept)
    return tuple((low, high) for low, high in kept)


def _metadata(model: Any, key: str) -> str:
    value = ctypes.create_string_buffer(256)
    found = library().llama_model_meta_val_str(model, key.encode(), value, len(value))
    return value.value.decode("utf-8", errors="replace") if found >= 0 else "unknown"

"""Loads an engine: chooses the settings, opens the file with them, and measures what the engine can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from edgespec.closing import closed_on_failure
from edgespec.engines.base import Engine
from edgespec.engines.llamacpp.facts import measured_facts
from edgespec.engines.llamacpp.library import library
from edgespec.engines.llamacpp.opening import ModelOpener, OpenModel, checked_target
from edgespec.engines.llamacpp.rpc import RpcServer
from edgespec.engines.llamacpp.running_state import RunningState, why_only_asked
from edgespec.engines.llamacpp.settings import ContextSettings, choose_context_length
from edgespec.engines.model_use import ModelUse
from edgespec.errors import CapabilityError

Made = TypeVar("Made", bound=Engine)
Maker = Callable[[Path, OpenModel], Made]


def load_engine(make: Maker[Made], path: Path, use: ModelUse, servers: tuple[RpcServer, ...]) -> Made:
    """What `make` gives for an open model, perhaps made several times to find its settings.

    Raises as `LlamaCppEngine.load`.
    """
    if servers and not use.gpu_layers:
        use = replace(use, gpu_layers=-1)
    header = checked_target(path)
    state = RunningState.of(header)
    length = choose_context_length(path, header.context_length, use.context_length, use.default_context)
    snapshots = state.snapshots_for(use.speculates) if state else 0
    checked = partial(ContextSettings.checked, context_length=length, servers=servers, snapshots=snapshots)
    opener = ModelOpener(path, use)
    types_are_free = use.cache_type_k is use.cache_type_v is None and use.flash_attention is not False
    if use.reproducible and not use.gpu_layers and types_are_free:
        found = _open_unpadded(make, opener, checked(replace(use, cache_type_k="q8_0")))
        if found is not None:
            return found
    engine = _open(make, opener, checked(use))
    if use.speculates is None and state and state.snapshots and not snapshots:
        engine.facts = replace(engine.facts, why_no_speculation=why_only_asked(header, state))
    return engine


def _open_unpadded(make: Maker[Made], opener: ModelOpener, settings: ContextSettings) -> Made | None:
    """With the cache types of `settings`, if single-token passes then have the bits of wider ones; else None.

    With an f16 cache of 512 cells and more llama.cpp's attention has a path of its own for one row, so that single
    tokens have to be padded, which takes 1.5 to 2 times as long. With keys in q8_0 it has not. Values stay f16: behind
    1,536 tokens q8_0 values made prompts a quarter slower and single tokens a seventh.
    """
    try:
        engine = _open(make, opener, settings)
    except CapabilityError:
        return None
    if engine.facts.pinned_class is not None and engine.facts.pinned_class[0] == 1:
        note = (
            "reproducible: the cached keys are q8_0, so that single-token steps need no padding (-ctk f16 keeps "
            "f16, at up to twice the time per undrafted token)"
        )
        engine.facts = replace(engine.facts, notes=(*engine.facts.notes, note))
        return engine
    engine.close()
    return None


def _open(make: Maker[Made], opener: ModelOpener, settings: ContextSettings) -> Made:
    found = opener.open(settings)
    engine = make(opener.path, found)
    with closed_on_failure(engine):
        state_size = partial(library().llama_state_seq_get_size, found.context, 0)
        engine.facts = measured_facts(engine, opener.path, found.settings, state_size)
    return engine

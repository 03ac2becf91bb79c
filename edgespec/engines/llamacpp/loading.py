"""Loads an engine: chooses the settings, opens the file as a model with a context, and measures what it can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from edgespec.closing import closed_on_failure
from edgespec.engines.base import Engine
from edgespec.engines.llamacpp.devices import handles_of, overriding
from edgespec.engines.llamacpp.facts import measured_facts
from edgespec.engines.llamacpp.library import CancelFlag, library, open_model
from edgespec.engines.llamacpp.rpc import RpcServer
from edgespec.engines.llamacpp.running_state import RunningState, keeps_running_state, why_only_asked
from edgespec.engines.llamacpp.settings import (
    ContextSettings,
    choose_context_length,
    create_context,
    has_streams,
    require_generator,
)
from edgespec.engines.model_use import ModelUse
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.check import HEAD_NAMES, check_gguf, head_kind, require_language_model
from edgespec.formats.gguf.header import GgufHeader


class OpenModel(NamedTuple):
    """A model and a context for it, with the settings that the context was made with."""

    model: Any
    context: Any
    settings: ContextSettings
    cancel: CancelFlag


@dataclass(frozen=True, slots=True)
class ModelOpener:
    """Opens `path`, as often as other settings of the context are tried."""

    path: Path
    use: ModelUse

    def open(self, settings: ContextSettings) -> OpenModel:
        """Raises ModelFileError, CapabilityError."""
        model = open_model(
            self.path,
            gpu_layers=self.use.gpu_layers,
            devices=None if self.use.devices is None else handles_of(self.use.devices),
            overrides=overriding(self.use.overrides),
            check_tensors=self.use.check_tensors,
            is_repacked=self.use.is_repacked,
            has_mtp=self.use.has_mtp,
        )
        settings = settings.with_state() if keeps_running_state(model) else replace(settings, snapshots=0)
        has_window = library().llama_model_n_swa(model) > 0
        if has_streams(settings, has_window=has_window):
            settings = replace(settings, max_branches=0, streams=True)
        cancel = CancelFlag()
        try:
            require_generator(model, self.path)
            return OpenModel(model, create_context(model, self.path, settings, cancel), settings, cancel)
        except BaseException:
            library().llama_model_free(model)
            raise


def checked_target(path: Path) -> GgufHeader:
    """The header of a model that generates text. Raises ModelNotFound, ModelFileError, CapabilityError for a head."""
    header = check_gguf(path)
    require_language_model(path, header)
    kind = head_kind(header)
    if kind is not None:
        raise CapabilityError(
            f"{path.name} is {HEAD_NAMES[kind]}, which only drafts for another model: give it with -md/--model-draft"
        )
    return header


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

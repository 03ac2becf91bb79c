"""Loads an engine: chooses the settings, opens the file with them, and measures what the engine can do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from edgespec.closing import closed_on_failure
from edgespec.engines.booked import BookedEngine
from edgespec.engines.llamacpp.cells import Cells
from edgespec.engines.llamacpp.facts import measured_facts
from edgespec.engines.llamacpp.opening import ModelOpener, OpenModel, checked_target
from edgespec.engines.llamacpp.rpc_probe import RpcServer
from edgespec.engines.llamacpp.running_state import RunningState, why_only_asked
from edgespec.engines.llamacpp.settings import (
    DEFAULT_CONTEXT,
    MAX_BATCH,
    MAX_BRANCHES,
    WIDEST,
    ContextSettings,
    choose_context_length,
)
from edgespec.errors import CapabilityError


class EngineOfFile(BookedEngine):
    """An engine that is made of an open model, and may be made several times to find its settings."""

    _cells: Cells

    @abstractmethod
    def __init__(self, path: Path, found: OpenModel) -> None:
        """Owns what was `found` at `path`."""

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        context_length: int | None = None,
        threads: int | None = None,
        gpu_layers: int = 0,
        devices: tuple[str, ...] | None = None,
        servers: tuple[RpcServer, ...] = (),
        kv_offload: bool = True,
        max_sequences: int = 1,
        max_batch: int = MAX_BATCH,
        max_branches: int = MAX_BRANCHES,
        cache_type_k: str | None = None,
        cache_type_v: str | None = None,
        flash_attention: bool | None = None,
        reproducible: bool | None = None,
        widest: int = WIDEST,
        check_tensors: bool = False,
        default_context: int = DEFAULT_CONTEXT,
        opened: Callable[[], None] = lambda: None,
        is_repacked: bool = True,
        speculates: bool | None = True,
        has_mtp: bool = False,
    ) -> Self:
        """Load `path` and measure what it can do.

        `context_length` in tokens per sequence, None for the trained one up to `default_context`; `threads` None for
        the physical cores; `gpu_layers` -1 for all, on `devices` (names; None: all GPUs; none: the CPU) and with
        their KV cache unless `kv_offload` is False; `servers`, RPC servers whose devices this process has (see
        `RemoteEngine`) and which hold all layers unless `gpu_layers` tells how many; `max_branches`, side branches of
        all trees in a batch; `cache_type_k` and `cache_type_v` None for f16, or keys in q8_0 where reproducible
        mode would pad single tokens; `reproducible` True finds a width class, None uses one only if it costs
        nothing, False uses none; `widest`, the widest pass of a class, which then limits `facts.max_batch`, so
        that prompts are read inside it; `check_tensors` reads all weights and refuses NaN; `opened` is called
        when the file is open and before it is used; `is_repacked` False leaves the weights as they are in the
        file, which loads faster and computes slower; `speculates` keeps what a model with a running state needs
        to drop the end of a draft; None only where that costs nothing; `has_mtp` loads the model's multi-token
        prediction layers for `load_mtp`.

        Raises ModelNotFound, ModelFileError, ConfigError for an option out of range, CapabilityError when this
        build or model cannot do what was asked.
        """
        header = checked_target(path)
        state = RunningState.of(header)
        gpu_layers = gpu_layers or (-1 if servers else 0)
        checked = partial(
            ContextSettings.checked,
            context_length=choose_context_length(path, header.context_length, context_length, default_context),
            threads=threads,
            gpu_layers=gpu_layers,
            devices=devices,
            servers=servers,
            kv_offload=kv_offload,
            max_sequences=max_sequences,
            max_batch=max_batch,
            max_branches=max_branches,
            flash_attention=flash_attention,
            reproducible=reproducible,
            widest=widest,
            snapshots=state.snapshots_for(speculates) if state else 0,
        )
        opener = ModelOpener(path, gpu_layers, devices, check_tensors, is_repacked, has_mtp, opened)
        if reproducible and not gpu_layers and cache_type_k is cache_type_v is None and flash_attention is not False:
            settings = checked(cache_type_k="q8_0", cache_type_v="f16")
            found = cls._open_unpadded(opener, settings)
            if found is not None:
                return found
        settings = checked(cache_type_k=cache_type_k or "f16", cache_type_v=cache_type_v or "f16")
        engine = cls._open(opener, settings)
        if speculates is None and state and state.snapshots and not settings.snapshots:
            engine.facts = replace(engine.facts, why_no_speculation=why_only_asked(header, state))
        return engine

    @classmethod
    def _open_unpadded(cls, opener: ModelOpener, settings: ContextSettings) -> Self | None:
        """With the cache types of `settings`, if single-token passes then have the bits of wider ones; else None.

        With an f16 cache of 512 cells and more llama.cpp's attention has a path of its own for one row, so that single
        tokens have to be padded, which takes 1.5 to 2 times as long. With keys in q8_0 it has not. Values stay f16:
        behind 1,536 tokens q8_0 values made prompts a quarter slower and single tokens a seventh.
        """
        try:
            engine = cls._open(opener, settings)
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

    @classmethod
    def _open(cls, opener: ModelOpener, settings: ContextSettings) -> Self:
        found = opener.open(settings)
        engine = cls(opener.path, found)
        with closed_on_failure(engine):
            engine.facts = measured_facts(engine, opener.path, found.settings, engine._cells.state_size)
        return engine

"""Settings of a llama.cpp context, and what follows from them for its engine.

They are checked here because llama.cpp ends the process on several bad values.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from edgespec.config.values import CPU
from edgespec.engines.llamacpp.devices import gpus, handles_of, overriding
from edgespec.engines.llamacpp.library import (
    CancelFlag,
    complaints,
    forget_complaints,
    library,
    require_threads,
    uninterrupted,
)
from edgespec.engines.model_use import DEFAULT_CONTEXT, ModelUse
from edgespec.errors import CapabilityError, ConfigError, ModelFileError
from edgespec.formats.gguf.check import model_files, pooling_of
from edgespec.formats.gguf.header import TENSOR_TYPES, GgufHeader

if TYPE_CHECKING:
    from edgespec.engines.base import EngineFacts

MAX_CELLS = 1 << 24
# Those that ggml's attention kernels read: its number, and the bytes of a number in a cache of the type.
_KINDS = {name.lower(): (number, num_bytes / size) for number, (name, size, num_bytes) in TENSOR_TYPES.items()}
CACHE_TYPES = {kind: _KINDS[kind][0] for kind in ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")}
CACHE_BYTES = {kind: _KINDS[kind][1] for kind in CACHE_TYPES}
AUTO, OFF, ON = -1, 0, 1
CELLS_MULTIPLE = 256  # llama.cpp rounds a context up to it
NO_POOLING = 0
PLAIN_TYPES = frozenset({"f32", "f16", "bf16"})
_NO_MEMORY = ("allocate memory", "Resource temporarily unavailable", "bad_alloc", "failed to allocate")


@dataclass(frozen=True, slots=True)
class ContextSettings(ModelUse):
    """The options of a load, checked, with what follows from the model.

    `devices`: names of those that the `gpu_layers` are placed on; None: RPC servers first, then all GPUs; none: the
    processor. `flash_attention` None leaves it to the library. `streams`: every sequence has cells of its own, so that
    attention reads no others' and adds in the order of its tokens whatever the others hold; there are no branches then,
    and a pass with different numbers of rows of several sequences becomes several. Otherwise all share their cells.
    `keeps_state`: the model keeps a running state, of which there are `snapshots` copies for each sequence.
    """

    context_length: int = DEFAULT_CONTEXT
    threads: int = 1
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    streams: bool = False
    keeps_state: bool = False
    snapshots: int = 0

    @classmethod
    def checked(cls, use: ModelUse, context_length: int, *, snapshots: int = 0) -> Self:
        """Raises ConfigError for a value out of range, CapabilityError for one that this build does not support."""
        kinds = {"cache_type_k": use.cache_type_k or "f16", "cache_type_v": use.cache_type_v or "f16"}
        settings = cls(**use.settled(context_length=context_length, **kinds), snapshots=snapshots)
        most = MAX_CELLS // settings.max_sequences
        if not 1 <= context_length <= most:
            raise ConfigError(f"a context of {context_length} tokens was asked for; 1 to {most} can be had")
        for kind in (settings.cache_type_k, settings.cache_type_v):
            if kind not in CACHE_TYPES:
                raise ConfigError(f"cache type {kind!r} is not known; allowed: {', '.join(CACHE_TYPES)}")
        if settings.flash_attention is False and settings.cache_type_v not in PLAIN_TYPES:
            raise ConfigError(f"a {settings.cache_type_v} cache for values needs flash attention; leave that on")
        if settings.devices:
            handles_of(settings.devices)
        elsewhere = next((name for _, name in settings.overrides if name != CPU), None)
        if elsewhere is not None and not use.gpu_layers:
            raise ConfigError(
                f"--override-tensor puts tensors on {elsewhere}, and no layer is on a GPU: give their number with -ngl"
            )
        if settings.gpu_layers and not settings.endpoints and not gpus():
            raise CapabilityError(
                f"{settings.gpu_layers} layers were asked for on a GPU, but this build of llama.cpp sees no GPU. Use "
                "-ngl 0; edgespec doctor shows how to get a build for each kind of GPU"
            )
        return replace(settings, widest=min(settings.widest, settings.max_batch, settings.context_length // 2 + 1))

    def for_model(self, *, keeps_state: bool, has_window: bool) -> Self:
        """The settings of a model that keeps a running state, or has a sliding window.

        One with a state has no trees and no width class; llama.cpp ends the process where a pass is too narrow for the
        rows that there are snapshots of. In reproducible mode each sequence gets cells of its own: those of a side
        branch are in another order than its tokens, and attention adds in the order of cells. In cells that sequences
        share llama.cpp may overwrite those behind a window, to which a rollback returns.
        """
        if keeps_state:
            snapshots = max(min(self.snapshots, self.max_rows - 2), 0)
            return replace(self, keeps_state=True, max_branches=0, snapshots=snapshots)
        streams = self.reproducible or (self.max_sequences > 1 and (has_window or not self.max_branches))
        return replace(self, streams=True, max_branches=0, snapshots=0) if streams else replace(self, snapshots=0)

    @property
    def sequence_ids(self) -> int:
        """Ids that llama.cpp keeps apart: sequences, and branches beyond each tree's main chain."""
        return self.max_sequences + self.max_branches

    @property
    def place(self) -> str:
        """Where the layers are, as `EngineFacts.device` says it."""
        if not self.gpu_layers or self.devices == ():
            return "cpu"
        if self.devices:
            return ",".join(self.devices)
        return "rpc " + ",".join(self.endpoints) if self.endpoints else "gpu"

    @property
    def cells(self) -> int:
        """KV cells: every sequence full, and behind each, where passes may be padded, room for that."""
        length = self.context_length + (self.widest if self.reproducible else 0)
        if self.streams:
            length = -(-length // CELLS_MULTIPLE) * CELLS_MULTIPLE
        return length * self.max_sequences

    @property
    def flash_attention_type(self) -> int:
        """llama.cpp's number. None turns it on in reproducible mode: without it softmax adds over empty cells too, and
        rounding depends on a token's place in the cache."""
        if self.flash_attention is None:
            return AUTO if self.reproducible is False and self.cache_type_v in PLAIN_TYPES else ON
        return ON if self.flash_attention else OFF

    def max_outputs(self, vocabulary_size: int) -> int:
        """As in the base class; llama.cpp wants a row for each id."""
        return max(ModelUse.max_outputs(self, vocabulary_size), self.sequence_ids)


def open_model(path: Path, use: ModelUse, *, vocabulary_only: bool = False) -> Any:
    """Load a model that passed `check_gguf`, with its shards, as `use` says.

    Without layers on a GPU no device is used: llama.cpp would send wide passes to one anyway. Raises ModelFileError
    with the library's own reason, CapabilityError for a device that is not there or for a lack of memory, ConfigError.
    """
    llama = library()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = use.gpu_layers
    if use.devices is not None or not use.gpu_layers:
        handles = handles_of(use.devices) if use.devices and use.gpu_layers else []
        with_end = (ctypes.c_void_p * (len(handles) + 1))(*handles)
        params.devices = ctypes.addressof(with_end)
    if (overrides := overriding(use.overrides)) is not None:
        params.tensor_buft_overrides = ctypes.addressof(overrides)
    params.vocab_only = vocabulary_only
    params.check_tensors = use.check_tensors
    params.use_extra_bufts = use.is_repacked
    params.load_mtp = use.has_mtp
    forget_complaints()
    files = [os.fsencode(file) for file in model_files(path)]
    names = (ctypes.c_char_p * len(files))(*files)
    load = partial(llama.llama_model_load_from_splits, names, len(files), params)
    if model := uninterrupted(load, llama.llama_model_free):
        return model
    if any(sign in complaints() for sign in _NO_MEMORY):
        advice = "Put fewer layers on the GPU (-ngl auto: as many as fit), or use" if use.gpu_layers else "Use"
        raise CapabilityError(f"{path.name} needs more memory than there is ({complaints()}). {advice} a smaller model")
    if use.overrides and "regular expression" in complaints():
        raise ConfigError(f"override-tensor: llama.cpp knows no such expressions ({complaints()}): use simpler ones")
    raise ModelFileError(f"{path} cannot be loaded by llama.cpp: {complaints()}. Download or export it again")


def new_context(model: Any, cancel: CancelFlag, *, requires_flash: bool = False, **given: Any) -> Any:
    """A llama_context with the parameters `given`, or a null pointer; then `complaints` has the reason.

    Not every model and device supports flash attention: without `requires_flash` the library may turn it off.
    """
    require_threads()
    llama = library()
    params = llama.llama_context_default_params()
    params.swa_full = True  # a sliding-window cache could not be rolled back
    params.no_perf = True
    for name, value in given.items():
        setattr(params, name, value)
    params.n_ubatch, params.n_threads_batch = params.n_batch, params.n_threads
    params.abort_callback, params.abort_callback_data = cancel.callback, cancel.callback_data
    forget_complaints()
    init = partial(llama.llama_init_from_model, model, params)
    context = uninterrupted(init, llama.llama_free)
    if not context and params.flash_attn_type == ON and not requires_flash:
        params.flash_attn_type = AUTO
        context = uninterrupted(init, llama.llama_free)
    return context


def create_context(model: Any, path: Path, settings: ContextSettings, cancel: CancelFlag) -> Any:
    """A llama_context. Raises CapabilityError with the library's reason when it refuses."""
    llama = library()
    context = new_context(
        model,
        cancel,
        requires_flash=settings.flash_attention is not None,
        n_ctx=settings.cells,
        n_batch=settings.max_rows,
        n_seq_max=settings.sequence_ids,
        n_rs_seq=settings.snapshots,
        n_outputs_max=settings.max_outputs(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))),
        n_threads=settings.threads,
        type_k=CACHE_TYPES[settings.cache_type_k],
        type_v=CACHE_TYPES[settings.cache_type_v],
        flash_attn_type=settings.flash_attention_type,
        kv_unified=not settings.streams,
        pooling_type=NO_POOLING,  # hidden states are wanted by the row
    )
    if not context:
        fewer = ", fewer layers on the GPU (-ngl auto: as many as fit)" if settings.gpu_layers else ""
        raise CapabilityError(
            f"llama.cpp refused a context of {settings.cells} cells for {path.name}: {complaints()}. "
            f"Try a smaller --ctx-size{fewer}, or other --cache-type-k/--cache-type-v"
        )
    if not llama.llama_get_memory(context):
        llama.llama_free(context)
        raise CapabilityError(f"{path.name} keeps no KV cache (an embedding model?); give one that generates text")
    return context


def read_facts(model: Any, header: GgufHeader, settings: ContextSettings, context: Any = None) -> EngineFacts:
    """The facts that need no pass. `context`: None for a model that keeps no cache."""
    from edgespec.engines.base import EngineFacts  # imports numpy, which a plan does without

    llama = library()
    placement = placement_of(settings)
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


def placement_of(settings: ContextSettings) -> tuple[object, ...]:
    """The devices that compute layers other than the CPU's; empty if there are none."""
    if not settings.gpu_layers or settings.devices == ():
        return ()
    seen = tuple((device.name, device.description, device.total_bytes) for device in gpus())
    return seen, settings.devices, settings.endpoints, *settings.overrides

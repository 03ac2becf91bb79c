"""Opens the engine of one model file: which library runs it, where its layers go, and the types of its cache."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from edgespec.closing import closed_on_failure
from edgespec.config import CacheType, LoadOptions
from edgespec.engines.base import Engine
from edgespec.engines.trial import Trial
from edgespec.errors import CapabilityError, ConfigError
from edgespec.formats.manifest import ModelFile
from edgespec.loading.requirements import cache_types, draft_context, drafts_trees


def load_libraries(models: Iterable[ModelFile]) -> None:
    """Import what opening them needs. Raises CapabilityError where a library is missing."""
    engines = {model.engine for model in models}
    if "onnx" in engines:
        from edgespec.engines.onnx.library import library

        library()
    if "llamacpp" in engines:
        from edgespec.engines.llamacpp.library import library

        library()


def open_target(
    options: LoadOptions,
    file: ModelFile,
    exit_layer: int | None,
    states: tuple[int, ...] | None,
    trial: Trial,
    *,
    speculates: bool | None,
    has_mtp: bool,
) -> Engine:
    """The target, cut after `exit_layer` if given; `states`: layers whose inputs come with its hidden states.

    `states` None: no hidden states are needed. `speculates` and `has_mtp` as in `LlamaCppEngine.load`.
    Raises as `open_engine`.
    """
    wanted = False if options.verify != "coupled" else options.reproducible
    return open_engine(
        options,
        file,
        options.context_tokens,
        _placement(options, is_draft=False),
        wanted,
        trial,
        exit_layer=exit_layer,
        states=states,
        speculates=speculates,
        has_mtp=has_mtp,
    )


def open_draft(options: LoadOptions, file: ModelFile, target: Engine, trial: Trial) -> Engine:
    """A draft model for `target`. Raises as `open_engine`, and CapabilityError for one that cannot roll back."""
    placement = _placement(options, is_draft=True)
    default = draft_context(target.facts.context_length)
    engine = open_engine(options, file, options.draft_context_length, placement, False, trial, draft_default=default)
    if not (engine.facts.can_rollback or engine.facts.has_checkpoints):
        engine.close()
        raise CapabilityError(f"draft {file.path.name} cannot roll back its state and so cannot draft")
    return engine


def _placement(options: LoadOptions, *, is_draft: bool) -> dict[str, Any]:
    """Where llama.cpp places a model."""
    layers, devices = options.target_gpu_layers, options.target_devices
    if is_draft:
        layers, devices = options.draft_model_gpu_layers, options.draft_devices
    found = {"gpu_layers": layers, "devices": devices, "kv_offload": options.kv_offload}
    return found | ({"endpoints": options.rpc_servers} if options.rpc and not is_draft else {})


def open_engine(
    options: LoadOptions,
    file: ModelFile,
    context_length: int | None,
    placement: dict[str, Any],
    reproducible: bool | None,
    trial: Trial,
    *,
    draft_default: int | None = None,
    exit_layer: int | None = None,
    states: tuple[int, ...] | None = None,
    speculates: bool | None = False,
    has_mtp: bool = False,
) -> Engine:
    """The engine of a file, opened and used no sooner than `trial` has done so.

    `placement`: of a GGUF, as `_placement` gives it. `draft_default`: tokens of the context where none are given, of a
    draft model. Raises what the `load` of its engine does.
    """
    trial.require_opened(file.path)
    opened = partial(trial.require_used, file.path)
    default: dict[str, Any] = {} if draft_default is None else {"default_context": draft_default}
    types = cache_types(options, is_draft=draft_default is not None)
    # Trees need it. Else a row would read what all other chats hold, too: with eight chats of 100 tokens and a draft a
    # 1B model wrote .82 of what it writes plainly, while drafts of several chats in one pass gain .1 at two.
    shares_cells = drafts_trees(options)
    if file.engine == "onnx":
        from edgespec.engines.onnx import OnnxEngine

        return OnnxEngine.load(
            file.path,
            context_length=context_length,
            threads=options.threads,
            max_sequences=options.parallel,
            provider=options.provider,
            cache_type=_onnx_cache_type(options, types),
            reproducible=reproducible,
            exit_layer=exit_layer,
            hidden_states=states is not None,
            state_layers=states or (),
            opened=opened,
            shares_cells=shares_cells,
            **default,
        )
    from edgespec.engines.llamacpp import LlamaCppEngine
    from edgespec.engines.remote import RemoteEngine

    if draft_default is None and options.provider not in ("auto", "cpu"):
        raise ConfigError(
            f"--provider {options.provider} is for ONNX models (--engine onnx, where a pair has both); layers of a "
            "GGUF go to a GPU with -ngl"
        )
    is_elsewhere = bool(placement["gpu_layers"]) or "endpoints" in placement
    if options.parallel > 1 and not is_elsewhere and not shares_cells:
        default["max_branches"] = 0
    engine = (RemoteEngine if "endpoints" in placement else LlamaCppEngine).load(
        file.path,
        context_length=context_length,
        threads=options.threads,
        max_sequences=options.parallel,
        cache_type_k=types[0],
        cache_type_v=types[1],
        reproducible=reproducible,
        opened=opened,
        speculates=speculates,
        has_mtp=has_mtp,
        **placement,
        **default,
    )
    with closed_on_failure(engine):
        engine.read_layers(states or ())
    return engine


def _onnx_cache_type(options: LoadOptions, types: tuple[CacheType | None, CacheType | None]) -> str:
    """The cache type of an ONNX model. Raises ConfigError for options that ONNX Runtime ignores."""
    given = {"-ngl": options.gpu_layers, "--device": options.device, "--rpc": options.rpc}
    for flag, value in given.items():
        if value:
            raise ConfigError(f"{flag} {value} is for llama.cpp; the device of an ONNX model is set with --provider")
    if types[0] != types[1]:
        raise ConfigError("an ONNX model caches keys and values in one type: give -ctk and -ctv the same, f32 or int8")
    return types[0] or "f32"

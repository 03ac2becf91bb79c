"""Opens the engine of one model file, in the library that runs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from edgespec.config import LoadOptions
from edgespec.engines.base import Engine
from edgespec.engines.model_use import ModelUse
from edgespec.errors import CapabilityError, ConfigError
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.kind import gives_only_embeddings
from edgespec.formats.manifest import ModelFile
from edgespec.loading.requirements import Chosen
from edgespec.loading.uses import draft_use, target_use


def load_libraries(models: Iterable[ModelFile]) -> None:
    """Import what opening them needs. Raises CapabilityError where a library is missing."""
    engines = {model.engine for model in models}
    if "onnx" in engines:
        from edgespec.engines.onnx.library import library

        library()
    if "llamacpp" in engines:
        from edgespec.engines.llamacpp.library import library

        library()


def open_target(options: LoadOptions, chosen: Chosen, states: tuple[int, ...] | None) -> Engine:
    """The target. `states`: layers whose inputs come with its hidden states; None: no hidden states are needed.

    Raises as `open_engine`.
    """
    file = chosen.pair.files["target"]
    if file.is_gguf and options.provider not in ("auto", "cpu"):
        raise ConfigError(
            f"--provider {options.provider} is for ONNX models (--engine onnx, where a pair has both); layers of a "
            "GGUF go to a GPU with -ngl"
        )
    use = replace(target_use(options, chosen), hidden_states=states is not None, state_layers=states or ())
    return open_engine(options, file, use)


def open_draft(options: LoadOptions, file: ModelFile, target: Engine) -> Engine:
    """A draft model for `target`. Raises as `open_engine`, and CapabilityError for one that cannot roll back."""
    engine = open_engine(options, file, draft_use(options, file, target.facts.context_length))
    if not (engine.facts.can_rollback or engine.facts.has_checkpoints):
        engine.close()
        raise CapabilityError(f"draft {file.path.name} cannot roll back its state and so cannot draft")
    return engine


def open_engine(options: LoadOptions, file: ModelFile, use: ModelUse) -> Engine:
    """The engine of a file. Raises as the engine's `load`, and ConfigError for `options` that ONNX Runtime ignores."""
    found = _open(options, file, use)
    if file.note:
        found.facts = replace(found.facts, notes=(*found.facts.notes, file.note))
    return found


def _open(options: LoadOptions, file: ModelFile, use: ModelUse) -> Engine:
    if file.engine == "onnx":
        from edgespec.engines.onnx import OnnxEngine

        _check_for_onnx(options, use)
        return OnnxEngine.load(file.path, use)
    if gives_only_embeddings(check_gguf(file.path)):
        from edgespec.engines.llamacpp.encoder import EncoderEngine

        return EncoderEngine.load(file.path, use)
    from edgespec.engines.llamacpp import LlamaCppEngine
    from edgespec.engines.remote import RemoteEngine

    return (RemoteEngine if use.endpoints else LlamaCppEngine).load(file.path, use)


def _check_for_onnx(options: LoadOptions, use: ModelUse) -> None:
    given = {"-ngl": options.gpu_layers, "--device": options.device, "--rpc": options.rpc}
    for flag, value in given.items():
        if value:
            raise ConfigError(f"{flag} {value} is for llama.cpp; the device of an ONNX model is set with --provider")
    if use.cache_type_k != use.cache_type_v:
        raise ConfigError("this model caches keys and values in one type: give -ctk and -ctv the same")

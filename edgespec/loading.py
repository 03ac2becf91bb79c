"""Opens what a run names: files are checked, then become engines, and the draft model a drafter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgespec.config import DrafterName, LoadOptions
from edgespec.drafters.base import Drafter
from edgespec.drafters.early_exit import EarlyExitDrafter, SharedStateDrafter
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.base import Engine
from edgespec.engines.gguf_split import is_early_exit
from edgespec.engines.measurements import file_key, key_of, recall, remember
from edgespec.engines.probe import check_model_file
from edgespec.errors import CapabilityError, ConfigError
from edgespec.manifest import ModelFile, ModelPair, check_file
from edgespec.models import resolve
from edgespec.tokenizer import Vocabulary, check_same_vocabulary


def open_models(options: LoadOptions) -> tuple[ModelPair, Engine, dict[DrafterName, Drafter]]:
    """The pair that `options` name, its target loaded, and the drafters that own a model.

    Raises ModelNotFound, ModelFileError, VocabularyMismatch (naming the first token that differs), CapabilityError
    when what was demanded is not possible, ConfigError for options that do not fit the engine.
    """
    pair = resolve(options.model, options.draft, options.engine, options.medium)
    _check_contents(pair.files["target"])
    exit_layer = _exit_layer(options, pair)
    wanted = _wanted_drafters(options, pair, exit_layer)
    roles = {role for name in wanted for role in _ROLES[name] if exit_layer is None or name != "early-exit"}
    for role in sorted(roles):
        _check_contents(pair.files[role])
    target = _open_target(options, pair.files["target"], exit_layer)
    opened: list[Engine] = [target]
    try:
        engines: dict[str, Engine] = {}
        for role in sorted(roles):
            engines[role] = _open_draft(options, pair.files[role], target)
            opened.append(engines[role])
        return pair, target, _drafters(wanted, engines, target)
    except BaseException:
        for engine in opened:
            engine.close()
        raise


_ROLES: dict[DrafterName, tuple[str, ...]] = {
    "model": ("draft",),
    "tree": ("draft",),
    "early-exit": ("draft",),
    "hierarchical": ("draft", "medium"),
}
_FLAGS = {"draft": "-md/--model-draft (draft=...)", "medium": "--medium (medium=...)"}


def _drafters(
    wanted: tuple[DrafterName, ...], engines: dict[str, Engine], target: Engine
) -> dict[DrafterName, Drafter]:
    """Those of `wanted`, and with hierarchical the draft model that it looks ahead with."""
    drafters: dict[DrafterName, Drafter] = {}
    if "early-exit" in wanted:
        own = engines.pop("draft", None) if "model" not in wanted else None
        drafters["early-exit"] = SharedStateDrafter(target) if own is None else EarlyExitDrafter(own)
    if "draft" in engines:
        drafters["model"] = small = ModelDrafter(engines["draft"])
        if "medium" in engines:
            drafters["hierarchical"] = HierarchicalDrafter(small, engines["medium"])
    return drafters


def _exit_layer(options: LoadOptions, pair: ModelPair) -> int | None:
    """Layers after which an ONNX target is cut for an early exit; None: it stays in one piece.

    Raises CapabilityError where an exit was asked for and there is none.
    """
    target, draft = pair.files["target"], pair.files.get("draft")
    if options.drafter not in ("auto", "early-exit"):
        return None
    if options.exit_layer is not None:
        if target.engine != "onnx":
            raise CapabilityError(
                "--exit-layer is for ONNX targets; the exit of a GGUF is chosen when it is written: edgespec export "
                f"--derive early-exit:{options.exit_layer}"
            )
        return options.exit_layer
    if target.engine == "onnx" and draft is not None and draft.engine == "onnx":
        from edgespec.engines.onnx.partition import exit_layer_of

        return exit_layer_of(draft.path, target.path)
    return None


def _wanted_drafters(options: LoadOptions, pair: ModelPair, exit_layer: int | None) -> tuple[DrafterName, ...]:
    """Which drafters to open: a pair's medium only for whoever asks, since it costs memory and one more load.

    Raises CapabilityError when the pair lacks what a drafter needs.
    """
    own: tuple[DrafterName, ...] = ()
    if pair.draft is not None:
        own = ("early-exit",) if _draft_is_exit(pair) else ("model",)
    if options.drafter == "auto":
        named: tuple[DrafterName, ...] = ("hierarchical",) if options.medium is not None else ()
        exits: tuple[DrafterName, ...] = ("early-exit",) if options.exit_layer is not None else ()
        wanted = tuple(dict.fromkeys((*own, *exits, *named)))
    else:
        wanted = (options.drafter,) if options.drafter in _ROLES else ()
    if "early-exit" in wanted and exit_layer is None and "early-exit" not in own:
        hint = "--exit-layer N, or " if pair.files["target"].engine == "onnx" else ""
        raise CapabilityError(
            f"drafter 'early-exit' needs to know where {pair.name!r} ends early: give {hint}a pair made with edgespec "
            "export --derive early-exit:LAYERS"
        )
    for name in wanted:
        for role in _ROLES[name] if name != "early-exit" else ():
            if role not in pair.files:
                raise CapabilityError(
                    f"drafter {name!r} needs a {role} model and {pair.name!r} has none: give {_FLAGS[role]}, or "
                    "use --drafter ngram"
                )
    return wanted


def _draft_is_exit(pair: ModelPair) -> bool:
    """Whether the pair's draft is the beginning of its target, over the same weights."""
    target, draft = pair.files["target"], pair.files["draft"]
    if target.engine != draft.engine:
        return False
    if target.engine == "onnx":
        return draft.path.parent == target.path.parent and draft.path != target.path
    return is_early_exit(draft.path, target.path)


@contextmanager
def open_vocabulary(options: LoadOptions) -> Iterator[tuple[ModelPair, Vocabulary]]:
    """The pair that `options` name and its target's vocabulary, without the weights where the engine can do without.

    Raises as `open_models`.
    """
    pair = resolve(options.model, options.draft, options.engine)
    file = pair.files["target"]
    if file.engine == "llamacpp":
        from edgespec.engines.llamacpp.vocabulary import VocabularyFile

        with VocabularyFile(file.path) as vocabulary:
            yield pair, vocabulary
    else:
        with _open(options, file, None, 0, reproducible=False) as engine:
            yield pair, engine.vocabulary


def _check_contents(model: ModelFile) -> None:
    """Hash what the manifest describes but is too large to hash at every start; try a file of unknown contents first.

    A graph with damaged weights loads without complaint, so nothing but a checksum finds them.
    """
    for file in model.all_files:
        if file.sha256 is not None and not file.is_verified:
            key = key_of("hashed", file_key(file.path), file.sha256)
            if recall("hashed", key) is None:
                check_file(file, is_large_too=True)
                remember("hashed", key, {"path": str(file.path)})
    if model.engine == "llamacpp":
        check_model_file(model.path, is_trusted=all(file.sha256 for file in model.all_files))


def _open_target(options: LoadOptions, file: ModelFile, exit_layer: int | None) -> Engine:
    wanted = False if options.verify != "coupled" else options.reproducible
    return _open(options, file, options.context_length, options.gpu_layers, wanted, exit_layer=exit_layer)


def _open_draft(options: LoadOptions, file: ModelFile, target: Engine) -> Engine:
    gpu_layers = options.gpu_layers if options.draft_gpu_layers is None else options.draft_gpu_layers
    engine = _open(options, file, options.draft_context_length, gpu_layers, reproducible=False, is_draft=True)
    try:
        check_same_vocabulary(target.vocabulary, engine.vocabulary)
        if not engine.facts.can_rollback:
            raise CapabilityError(f"draft {file.path.name} cannot roll back its state and so cannot draft")
    except BaseException:
        engine.close()
        raise
    return engine


def _open(
    options: LoadOptions,
    file: ModelFile,
    context_length: int | None,
    gpu_layers: int,
    reproducible: bool | None,
    *,
    is_draft: bool = False,
    exit_layer: int | None = None,
) -> Engine:
    """The engine of a file; its library is loaded when the first model is."""
    if file.engine == "onnx":
        from edgespec.engines.onnx import OnnxEngine

        return OnnxEngine.load(
            file.path,
            context_length=context_length,
            threads=options.threads,
            provider=options.provider,
            cache_type="f32" if is_draft else _onnx_cache_type(options),
            reproducible=reproducible,
            exit_layer=exit_layer,
        )
    from edgespec.engines.llamacpp import LlamaCppEngine

    types = (None, None) if is_draft else (options.cache_type_k, options.cache_type_v)
    return LlamaCppEngine.load(
        file.path,
        context_length=context_length,
        threads=options.threads,
        gpu_layers=gpu_layers,
        cache_type_k=types[0] or "f16",
        cache_type_v=types[1] or "f16",
        reproducible=reproducible,
    )


def _onnx_cache_type(options: LoadOptions) -> str:
    """Raises ConfigError for what an ONNX target would silently not heed."""
    if options.gpu_layers:
        raise ConfigError(f"-ngl {options.gpu_layers} is for llama.cpp; the device of an ONNX model is --provider")
    if options.cache_type_k != options.cache_type_v:
        raise ConfigError("keys and values of an ONNX model have one type: give -ctk and -ctv alike, f32 or int8")
    return options.cache_type_k or "f32"

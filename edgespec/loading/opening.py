"""Opens the models of a run: checks their files, loads the engines, and makes drafters of the draft models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from edgespec.config import MAX_DRAFT_LENGTH, CacheType, DrafterName, LoadOptions
from edgespec.drafters.base import Drafter
from edgespec.drafters.early_exit import EarlyExitDrafter, SharedStateDrafter
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.base import Engine
from edgespec.engines.trial import Trial
from edgespec.errors import CapabilityError, ConfigError, ModelFileError
from edgespec.formats.gguf.header import keeping_headers, read_header
from edgespec.formats.gguf.split import model_files
from edgespec.formats.manifest import ModelFile, ModelPair, check_file
from edgespec.loading.checksums import check_hash, was_hashed
from edgespec.loading.draft_vocabulary import draft_cache
from edgespec.loading.heads import open_eagle3, open_heads, read_heads, state_layers
from edgespec.loading.registry import resolve
from edgespec.loading.requirements import Chosen
from edgespec.vocabulary import Vocabulary, check_same_vocabulary

DEFAULT_DRAFT_CONTEXT = 4096


def start_trial(options: LoadOptions, pair: ModelPair) -> Trial:
    """Check the headers of the models to open, and start to try those of unknown contents in a child process.

    Raises ModelNotFound, ModelFileError, and CapabilityError when the pair lacks what the options need.
    """
    models = [pair.files[role] for role in Chosen.of(options, pair).roles]
    return Trial({model.path: all(file.sha256 for file in model.all_files) for model in models})


@keeping_headers()
def open_models(
    options: LoadOptions, pair: ModelPair | None = None, trial: Trial | None = None
) -> tuple[ModelPair, Engine, dict[DrafterName, Drafter]]:
    """The pair that `options` name, its target loaded, and the drafters that own a model.

    `pair`: the same, already resolved; `trial`: of its models, already started. Raises ModelNotFound, ModelFileError,
    VocabularyMismatch (naming the first token that differs), CapabilityError when something is not possible,
    ConfigError for options that do not fit the engine, and MemoryError.
    """
    pair = pair or resolve_pair(options)
    with trial or start_trial(options, pair) as trial:
        return _open_models(options, pair, trial)


def resolve_pair(options: LoadOptions, *, check_hashes: bool = True) -> ModelPair:
    """The pair that `options` name. Raises as `resolve`."""
    return resolve(options.model, options.draft, options.engine, options.medium, check_hashes=check_hashes)


def _open_models(
    options: LoadOptions, pair: ModelPair, trial: Trial
) -> tuple[ModelPair, Engine, dict[DrafterName, Drafter]]:
    chosen = Chosen.of(options, pair)
    exit_layer, wanted, is_cut = chosen.exit_layer, chosen.wanted, chosen.is_cut
    weight_checks = _check_contents([pair.files[role] for role in chosen.roles])
    _load_libraries(pair.files[role] for role in chosen.roles)  # while the child works
    trial.require_usable()
    heads = read_heads(options, pair, is_cut=is_cut)
    states = state_layers(heads.values()) if heads else None
    target = _open_target(options, pair.files["target"], exit_layer, states)
    drafters: dict[DrafterName, Drafter] = {}
    try:
        for name in wanted:
            drafters |= _opened(name, options, pair, target, drafters, is_cut=is_cut)
        drafters |= {each.manifest.kind: open_heads(each, path, target) for path, each in heads.items()}
        for check in weight_checks:
            check.result()
        trial.require_sound()
    except BaseException:
        for drafter in drafters.values():
            drafter.close()
        target.close()
        raise
    return pair, target, drafters


def _opened(
    name: DrafterName,
    options: LoadOptions,
    pair: ModelPair,
    target: Engine,
    opened: dict[DrafterName, Drafter],
    *,
    is_cut: bool,
) -> dict[DrafterName, Drafter]:
    """The drafters with models for `name` that are not `opened` yet. `is_cut`: the target is loaded with an exit."""
    if name == "early-exit":
        if is_cut:
            return {name: SharedStateDrafter(target, options.draft_temperature)}
        engine = _open_draft(options, pair.files["draft"], target)
        return {name: EarlyExitDrafter(engine, temperature=options.draft_temperature)}
    if name == "eagle3":
        return {name: open_eagle3(options, pair.files["draft"], target)}
    # An exit is a draft model already: no second one is opened beside it.
    known = next((each for each in opened.values() if isinstance(each, ModelDrafter)), None)
    small = known or _model_drafter(options, pair.files["draft"], target)
    found: dict[DrafterName, Drafter] = {} if known else {"model": small}
    if name != "hierarchical":
        return found
    try:
        medium = _open_medium(options, pair.files["medium"], target)
        return found | {name: HierarchicalDrafter(small, medium, options.draft_temperature)}
    except BaseException:
        for drafter in found.values():
            drafter.close()
        raise


def _open_medium(options: LoadOptions, file: ModelFile, target: Engine) -> Engine:
    medium = _open_draft(options, file, target)
    try:
        check_same_vocabulary(target.vocabulary, medium.vocabulary)
    except BaseException:
        medium.close()
        raise
    return medium


def _model_drafter(options: LoadOptions, file: ModelFile, target: Engine) -> ModelDrafter:
    engine = _open_draft(options, file, target)
    try:
        cache, note = draft_cache(target, engine, file.path.name)
    except BaseException:
        engine.close()
        raise
    return ModelDrafter(engine, cache, (note,) if note else (), options.draft_temperature)


@contextmanager
def open_vocabulary(options: LoadOptions) -> Iterator[tuple[ModelPair, Vocabulary]]:
    """The pair that `options` name and its target's vocabulary, without loading the weights where the engine can.

    Raises as `open_models`.
    """
    pair = resolve(options.model, options.draft, options.engine)
    file = pair.files["target"]
    if file.engine == "llamacpp":
        from edgespec.engines.llamacpp.tokenizer import VocabularyFile

        with VocabularyFile(file.path) as vocabulary:
            yield pair, vocabulary
    else:
        with _open(options, file, None, 0, reproducible=False) as engine:
            yield pair, engine.vocabulary


def has_chat_template(file: ModelFile) -> bool:
    """Whether a model comes with a chat template; reads the header of a GGUF, or the files beside an ONNX graph.

    True where the files cannot be read: loading says better what is wrong with them.
    """
    try:
        if file.engine == "llamacpp":
            model_files(file.path)  # a part of a model holds no template, and says which file to open
            return bool(read_header(file.path).metadata.get("tokenizer.chat_template"))
        from edgespec.engines.onnx.tokenizer import read_chat_template

        return read_chat_template(file.path.parent) is not None
    except (ModelFileError, OSError):
        return True


def _load_libraries(models: Iterable[ModelFile]) -> None:
    """Import what opening them needs. Raises CapabilityError where a library is missing."""
    engines = {model.engine for model in models}
    if "onnx" in engines:
        from edgespec.engines.onnx.library import library

        library()
    if "llamacpp" in engines:
        from edgespec.engines.llamacpp.library import library

        library()


def _check_contents(models: Sequence[ModelFile]) -> list[Future[None]]:
    """Hash large files that the manifest describes, once.

    A graph with damaged weights loads without an error, so only a checksum finds them. Weights of ONNX models, whose
    contents cannot harm the process, are hashed while the models load: the results raise ModelFileError.
    """
    later: list[ModelFile] = []
    for model in models:
        for file in model.all_files:
            if file.sha256 is not None and not file.is_verified and not was_hashed(file):
                check_file(file, hashed=False)
                if file.path.suffix == ".data":
                    later.append(file)
                else:
                    check_hash(file)
    if not later:
        return []
    thread = ThreadPoolExecutor(1, "edgespec-checksums")
    checks = [thread.submit(check_hash, file) for file in later]
    thread.shutdown(wait=False)
    return checks


def _open_target(
    options: LoadOptions, file: ModelFile, exit_layer: int | None, states: tuple[int, ...] | None
) -> Engine:
    """`states`: layers whose inputs come with the hidden states; None: no hidden states are needed."""
    wanted = False if options.verify != "coupled" else options.reproducible
    return _open(
        options,
        file,
        options.context_length,
        options.gpu_layers,
        wanted,
        exit_layer=exit_layer,
        states=states,
    )


def _open_draft(options: LoadOptions, file: ModelFile, target: Engine) -> Engine:
    gpu_layers = options.gpu_layers if options.draft_gpu_layers is None else options.draft_gpu_layers
    default = draft_context(target.facts.context_length)
    engine = _open(options, file, options.draft_context_length, gpu_layers, reproducible=False, draft_default=default)
    if not engine.facts.can_rollback:
        engine.close()
        raise CapabilityError(f"draft {file.path.name} cannot roll back its state and so cannot draft")
    return engine


def draft_context(target_context: int) -> int:
    """Tokens of a draft model's context beside a target's where none are given: no more than it can ever use."""
    return min(target_context + MAX_DRAFT_LENGTH, DEFAULT_DRAFT_CONTEXT)


def _open(
    options: LoadOptions,
    file: ModelFile,
    context_length: int | None,
    gpu_layers: int,
    reproducible: bool | None,
    *,
    draft_default: int | None = None,
    exit_layer: int | None = None,
    states: tuple[int, ...] | None = None,
) -> Engine:
    """The engine of a file; its library is loaded when the first model is.

    `draft_default`: tokens of the context where none are given, of a draft model.
    """
    default: dict[str, Any] = {} if draft_default is None else {"default_context": draft_default}
    types = cache_types(options, is_draft=draft_default is not None)
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
            **default,
        )
    from edgespec.engines.llamacpp import LlamaCppEngine

    engine = LlamaCppEngine.load(
        file.path,
        context_length=context_length,
        threads=options.threads,
        max_sequences=options.parallel,
        gpu_layers=gpu_layers,
        cache_type_k=types[0],
        cache_type_v=types[1],
        reproducible=reproducible,
        **default,
    )
    try:
        engine.read_layers(states or ())
    except CapabilityError:
        engine.close()
        raise
    return engine


def cache_types(options: LoadOptions, *, is_draft: bool) -> tuple[CacheType | None, CacheType | None]:
    """Types of cached keys and values of the target or of a draft model."""
    if is_draft:
        return options.draft_cache_type_k, options.draft_cache_type_v
    return options.cache_type_k, options.cache_type_v


def _onnx_cache_type(options: LoadOptions, types: tuple[CacheType | None, CacheType | None]) -> str:
    """The cache type of an ONNX model. Raises ConfigError for options that ONNX Runtime ignores."""
    if options.gpu_layers:
        raise ConfigError(f"-ngl {options.gpu_layers} is for llama.cpp; the device of an ONNX model is --provider")
    if types[0] != types[1]:
        raise ConfigError("keys and values of an ONNX model have one type: give -ctk and -ctv alike, f32 or int8")
    return types[0] or "f32"

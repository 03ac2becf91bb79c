"""Opens the models of a run: checks their files, loads the engines, and makes drafters of the draft models.

Not what a load measures, or whether it succeeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from edgespec.closing import closed_on_failure
from edgespec.config.options import LoadOptions
from edgespec.config.values import DrafterName
from edgespec.drafters.base import Drafter
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.model import EarlyExitDrafter, ModelDrafter
from edgespec.drafters.spec import HEAD_FILES
from edgespec.engines.base import Engine
from edgespec.engines.model_use import ModelUse
from edgespec.engines.trial import Trial
from edgespec.errors import CapabilityError, ConfigError, ModelFileError, UsageError
from edgespec.formats.gguf.check import check_gguf, gives_only_embeddings, model_files, require_language_model
from edgespec.formats.gguf.header import keeping_headers, read_header
from edgespec.formats.manifest import ModelFile, ModelPair
from edgespec.loading.download import check_hash, was_hashed
from edgespec.loading.drafts import draft_cache
from edgespec.loading.heads import open_head_file, open_heads, open_own_layers, read_heads, state_layers
from edgespec.loading.requirements import Chosen, draft_use, resolve_pair, target_use
from edgespec.vocabulary import check_same_vocabulary


def start_trial(options: LoadOptions, pair: ModelPair) -> Trial:
    """Check the headers of the models to open, and start to try those of unknown contents in a child process.

    Raises ModelNotFound, ModelFileError, and CapabilityError when the pair lacks what the options need.
    """
    models = [pair.files[role] for role in Chosen.of(options, pair).roles]
    models = [each for each in models if not (each.is_gguf and each.engine == "onnx")]  # read by nobody but us
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


def _open_models(
    options: LoadOptions, pair: ModelPair, trial: Trial
) -> tuple[ModelPair, Engine, dict[DrafterName, Drafter]]:
    chosen = Chosen.of(options, pair)
    _check_contents(pair.files[role] for role in chosen.roles)
    load_libraries(pair.files[role] for role in chosen.roles)  # while the child works
    heads = read_heads(options, pair)
    states = state_layers(heads.values()) if heads else None
    trial.require_sound()
    target = open_target(options, chosen, states)
    drafters: dict[DrafterName, Drafter] = {}
    try:
        for name in chosen.wanted:
            drafters |= _opened(name, options, chosen, target, drafters)
        drafters |= {each.manifest.kind: open_heads(each, path, target) for path, each in heads.items()}
    except BaseException:
        for drafter in drafters.values():
            drafter.close()
        target.close()
        raise
    return pair, target, drafters


def _opened(
    name: DrafterName,
    options: LoadOptions,
    chosen: Chosen,
    target: Engine,
    opened: dict[DrafterName, Drafter],
) -> dict[DrafterName, Drafter]:
    """The drafters with models for `name` that are not `opened` yet."""
    pair = chosen.pair
    if name == "early-exit":
        return {name: _early_exit(options, target)}
    if name == "mtp" and chosen.has_own_mtp:
        return {name: open_own_layers(options, target)}
    if name in HEAD_FILES:
        return {name: open_head_file(options, pair.files["draft"], target)}
    # An exit is a draft model already: no second one is opened beside it.
    known = next((each for each in opened.values() if isinstance(each, ModelDrafter)), None)
    small = known or _model_drafter(options, pair.files["draft"], target)
    found: dict[DrafterName, Drafter] = {} if known else {"model": small}
    if name != "hierarchical":
        return found
    with closed_on_failure(*found.values()):
        medium = open_draft(options, pair.files["medium"], target)
        with closed_on_failure(medium):
            check_same_vocabulary(target.vocabulary, medium.vocabulary)
            return found | {name: HierarchicalDrafter(small, medium)}


def _early_exit(options: LoadOptions, target: Engine) -> EarlyExitDrafter:
    from edgespec.engines.onnx.kernel_engine import KernelEngine

    assert isinstance(target, KernelEngine)  # `exit_layer_of` leaves GGUFs on kernels only
    assert options.exit_layer is not None
    engine = target.first_layers(options.exit_layer, options.draft_context_length)
    return EarlyExitDrafter(engine)


def _model_drafter(options: LoadOptions, file: ModelFile, target: Engine) -> ModelDrafter:
    engine = open_draft(options, file, target)
    with closed_on_failure(engine):
        cache, note = draft_cache(target, engine, file.path.name)
    return ModelDrafter(engine, cache, (note,) if note else ())


def has_chat_template(file: ModelFile) -> bool:
    """Whether a model comes with a chat template; reads the header of a GGUF, or the files beside an ONNX graph.

    True where the files cannot be read: loading says better what is wrong with them.
    """
    try:
        if file.is_gguf:
            model_files(file.path)  # a part of a model holds no template, and says which file to open
            header = read_header(file.path)
            require_language_model(file.path, header)
            return bool(header.metadata.get("tokenizer.chat_template"))
        from edgespec.engines.onnx.tokenizer import read_chat_template

        return read_chat_template(file.path.parent) is not None
    except (ModelFileError, OSError):
        return True


def require_writer_file(file: ModelFile) -> None:
    """Raises ModelFileError for a model that gives embeddings only. A file that cannot be read passes: see above."""
    if not file.is_gguf:
        return
    try:
        header = read_header(file.path)
    except (UsageError, OSError):
        return
    if gives_only_embeddings(header):
        require_language_model(file.path, header)


def _check_contents(models: Iterable[ModelFile]) -> None:
    """Hash large files that the manifest describes, once: a graph with damaged weights loads without an error."""
    for file in (file for model in models for file in model.all_files):
        if file.sha256 is not None and not file.is_verified and not was_hashed(file):
            check_hash(file)


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
    has_states = states is not None or (file.engine == "onnx" and "mtp" in chosen.wanted)
    use = replace(target_use(options, chosen), hidden_states=has_states, state_layers=states or ())
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
        from edgespec.engines.llamacpp.embeddings import EncoderEngine

        return EncoderEngine.load(file.path, use)
    from edgespec.engines.llamacpp.engine import LlamaCppEngine
    from edgespec.engines.remote import RemoteEngine

    return (RemoteEngine if use.endpoints else LlamaCppEngine).load(file.path, use)


def _check_for_onnx(options: LoadOptions, use: ModelUse) -> None:
    given = {"-ngl": options.gpu_layers, "--device": options.device, "--rpc": options.rpc}
    given["--override-tensor"] = options.override_tensor
    for flag, value in given.items():
        if value:
            raise ConfigError(f"{flag} {value} is for llama.cpp; the device of an ONNX model is set with --provider")
    if use.cache_type_k != use.cache_type_v:
        raise ConfigError("this model caches keys and values in one type: give -ctk and -ctv the same")

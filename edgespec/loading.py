"""Opens what a run names: files are checked, then become engines, and the draft model a drafter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgespec.config import DrafterName, LoadOptions
from edgespec.drafters.base import Drafter
from edgespec.drafters.mapped import MappedSequence, map_vocabulary
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.base import Engine
from edgespec.engines.measurements import file_key, key_of, recall, remember
from edgespec.engines.probe import check_model_file
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import CapabilityError, ConfigError, VocabularyMismatch
from edgespec.manifest import ModelFile, ModelPair, check_file
from edgespec.models import resolve
from edgespec.prompts import PROMPTS
from edgespec.tokenizer import Vocabulary, check_same_vocabulary

NEED_A_DRAFT = frozenset({"model", "tree", "hybrid"})
LEAST_OVERLAP = 0.5  # of the tokens of a text, that a draft with another vocabulary must have


def open_models(options: LoadOptions) -> tuple[ModelPair, Engine, dict[DrafterName, Drafter]]:
    """The pair that `options` name, its target loaded, and the drafters that own a model.

    Raises ModelNotFound, ModelFileError, VocabularyMismatch (naming the first token that differs), CapabilityError
    when what was demanded is not possible, ConfigError for options that do not fit the engine.
    """
    pair = resolve(options.model, options.draft, options.engine)
    wants_draft = options.drafter in NEED_A_DRAFT or (options.drafter == "auto" and pair.draft is not None)
    if wants_draft and pair.draft is None:
        raise CapabilityError(
            f"drafter {options.drafter!r} needs a draft model and {pair.name!r} has none: give -md/--model-draft "
            "(draft=...), or use --drafter ngram"
        )
    for role in ("target", "draft") if wants_draft else ("target",):
        _check_contents(pair.files[role])
    target = _open_target(options, pair.files["target"])
    try:
        drafters: dict[DrafterName, Drafter] = {"model": _open_draft(options, pair, target)} if wants_draft else {}
    except BaseException:
        target.close()
        raise
    return pair, target, drafters


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


def _open_target(options: LoadOptions, file: ModelFile) -> Engine:
    wanted = False if options.verify != "coupled" else options.reproducible
    return _open(options, file, options.context_length, options.gpu_layers, wanted)


def _open_draft(options: LoadOptions, pair: ModelPair, target: Engine) -> ModelDrafter:
    file = pair.files["draft"]
    gpu_layers = options.gpu_layers if options.draft_gpu_layers is None else options.draft_gpu_layers
    engine = _open(options, file, options.draft_context_length, gpu_layers, reproducible=False, is_draft=True)
    try:
        cache, note = _draft_cache(target, engine, file)
        if not engine.facts.can_rollback:
            raise CapabilityError(f"draft {file.path.name} cannot roll back its state and so cannot draft")
    except BaseException:
        engine.close()
        raise
    return ModelDrafter(engine, cache, (note,) if note else (), options.draft_temperature)


def _draft_cache(target: Engine, draft: Engine, file: ModelFile) -> tuple[CachedSequence, str]:
    """The draft's cache as the target counts tokens, and what a user must know of another vocabulary.

    Raises VocabularyMismatch naming the first token that differs, where too little of a text can be drafted.
    """
    why = _difference(target.vocabulary, draft.vocabulary)
    if not why:
        return CachedSequence(draft), ""
    mapping = map_vocabulary(target.vocabulary, draft)
    in_text = mapping.share_of(target.vocabulary.encode(" ".join(prompt.text for prompt in PROMPTS)))
    overlap = f"{file.path.name} has {mapping.share:.1%} of the target's tokens and {in_text:.1%} of those in a text"
    if in_text < LEAST_OVERLAP:
        raise VocabularyMismatch(
            f"{why}. {overlap}; at least {LEAST_OVERLAP:.0%} of the latter are needed. Use a draft of the same model "
            "family, or --drafter ngram, which needs none"
        )
    return MappedSequence(draft, mapping), f"{why}. {overlap}, and proposes no others"


def _difference(target: Vocabulary, draft: Vocabulary) -> str:
    """How the draft's token ids differ from the target's; empty when they mean the same, padding aside."""
    try:
        check_same_vocabulary(target, draft)
    except VocabularyMismatch as exc:
        return str(exc).partition(". Use")[0]
    if any(target.pieces[draft.size :]):
        return f"target and draft have different vocabularies: the draft ends with token {draft.size - 1}"
    return ""


def _open(
    options: LoadOptions,
    file: ModelFile,
    context_length: int | None,
    gpu_layers: int,
    reproducible: bool | None,
    *,
    is_draft: bool = False,
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

"""Opens what a run names: files are checked, then become engines, and the draft model a drafter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.config import DrafterName, LoadOptions
from edgespec.drafters.base import Drafter
from edgespec.drafters.eagle import EagleDrafter
from edgespec.drafters.medusa import MedusaDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.base import Engine
from edgespec.engines.measurements import file_key, key_of, recall, remember
from edgespec.engines.probe import check_model_file
from edgespec.errors import CapabilityError, ConfigError, ModelFileError
from edgespec.headfile import HeadFile, read_head_file
from edgespec.manifest import HEAD_KINDS, ModelFile, ModelPair, check_file
from edgespec.models import resolve
from edgespec.tokenizer import check_same_vocabulary
from edgespec.types import Batch


def open_models(options: LoadOptions) -> tuple[ModelPair, Engine, dict[DrafterName, Drafter]]:
    """The pair that `options` name, its target loaded, and the drafters that own a model.

    Raises ModelNotFound, ModelFileError, VocabularyMismatch (naming the first token that differs), CapabilityError
    when what was demanded is not possible, ConfigError for options that do not fit the engine.
    """
    pair = resolve(options.model, options.draft, options.engine)
    wants_draft = options.drafter == "model" or (options.drafter == "auto" and pair.draft is not None)
    if wants_draft and pair.draft is None:
        raise CapabilityError(
            f"drafter 'model' needs a draft model and {pair.name!r} has none: give -md/--model-draft (draft=...), or "
            "use --drafter ngram"
        )
    for role in ("target", "draft") if wants_draft else ("target",):
        _check_contents(pair.files[role])
    heads = _read_heads(options, pair)
    target = _open_target(options, pair.files["target"], hidden_states=bool(heads))
    try:
        drafters: dict[DrafterName, Drafter] = {"model": _open_draft(options, pair, target)} if wants_draft else {}
        drafters |= {each.manifest.kind: _open_heads(each, path, target) for path, each in heads.items()}
    except BaseException:
        target.close()
        raise
    return pair, target, drafters


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


def _open_target(options: LoadOptions, file: ModelFile, *, hidden_states: bool) -> Engine:
    wanted = False if options.verify != "coupled" else options.reproducible
    return _open(options, file, options.context_length, options.gpu_layers, wanted, hidden_states=hidden_states)


def _read_heads(options: LoadOptions, pair: ModelPair) -> dict[Path, HeadFile]:
    """The files of heads that the options ask for: the one they name, else those of the pair that may be drafted with.

    `auto` takes the pair's own where it has no draft model: two that draft much the same cost trials for little.

    Raises CapabilityError when the asked drafter has none, ModelFileError for a damaged file.
    """
    is_open = options.drafter == "auto" and pair.draft is None
    wanted = [kind for kind in HEAD_KINDS if is_open or kind == options.drafter]
    paths = [pair.heads[kind].path for kind in wanted if kind in pair.heads]
    if options.heads is not None and options.drafter != "none":
        paths = [options.heads.expanduser()]
    found = {path: read_head_file(path) for path in paths}
    if options.drafter in HEAD_KINDS and options.drafter not in {each.manifest.kind for each in found.values()}:
        has = f"{paths[0].name} holds {found[paths[0]].manifest.kind} heads" if paths else f"{pair.name!r} has none"
        raise CapabilityError(
            f"drafter {options.drafter!r} needs a file of such heads and {has}: give --heads FILE (heads=...), made by "
            f"edgespec train-heads --kind {options.drafter}"
        )
    return found


def _open_heads(heads: HeadFile, path: Path, target: Engine) -> Drafter:
    """A drafter with these heads. Raises ModelFileError when they were trained for another target."""
    manifest, vocabulary = heads.manifest, target.vocabulary
    if manifest.vocabulary_size > vocabulary.size or not heads.is_of(_probed(heads, target)):
        raise ModelFileError(
            f"{path} holds heads for another target ({manifest.target}, hidden size {manifest.hidden_size}, "
            f"{manifest.vocabulary_size} tokens): give the file that edgespec train-heads made for this one"
        )
    kind = MedusaDrafter if manifest.kind == "medusa" else EagleDrafter
    return kind(heads, vocabulary.size, vocabulary.end_ids)


def _probed(heads: HeadFile, target: Engine) -> NDArray[np.float32]:
    """The hidden states that `target` gives the tokens by which heads know theirs; its cache is left empty."""
    target.give_hidden_states(True)
    try:
        target.forward(Batch.chain(heads.probe_ids))
        return target.hidden_states().copy()
    finally:
        target.rollback(0)
        target.give_hidden_states(False)


def _open_draft(options: LoadOptions, pair: ModelPair, target: Engine) -> ModelDrafter:
    file = pair.files["draft"]
    gpu_layers = options.gpu_layers if options.draft_gpu_layers is None else options.draft_gpu_layers
    engine = _open(options, file, options.draft_context_length, gpu_layers, reproducible=False, is_draft=True)
    try:
        check_same_vocabulary(target.vocabulary, engine.vocabulary)
        if not engine.facts.can_rollback:
            raise CapabilityError(f"draft {file.path.name} cannot roll back its state and so cannot draft")
    except BaseException:
        engine.close()
        raise
    return ModelDrafter(engine)


def _open(
    options: LoadOptions,
    file: ModelFile,
    context_length: int | None,
    gpu_layers: int,
    reproducible: bool | None,
    *,
    is_draft: bool = False,
    hidden_states: bool = False,
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
            hidden_states=hidden_states,
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

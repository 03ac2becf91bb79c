"""Opens the models of a run: checks their files, loads the engines, and makes drafters of draft models and heads.

Not what a load measures, or whether it succeeds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.closing import closed_on_failure
from edgespec.config.options import LoadOptions
from edgespec.config.values import DrafterName
from edgespec.drafters.base import Drafter
from edgespec.drafters.heads import (
    DFlashDrafter,
    Eagle3Drafter,
    EagleDrafter,
    Gemma4Drafter,
    HeadDrafter,
    MedusaDrafter,
    MtpDrafter,
)
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.model import EarlyExitDrafter, ModelDrafter
from edgespec.drafters.spec import HEAD_FILES
from edgespec.engines.base import Engine
from edgespec.engines.model_use import WINDOW, ModelUse
from edgespec.engines.trial import FileTrial
from edgespec.errors import CapabilityError, ConfigError, ModelFileError, UsageError
from edgespec.formats.gguf.check import check_gguf, gives_only_embeddings, model_files, require_language_model
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import HeadForm, read_head
from edgespec.formats.head_file import HeadFile, read_head_file
from edgespec.formats.manifest import HEAD_KINDS, ModelFile, ModelPair
from edgespec.loading.download import check_hash
from edgespec.loading.drafts import draft_cache
from edgespec.loading.requirements import Chosen, draft_use, head_paths, target_use
from edgespec.types import Batch
from edgespec.vocabulary import check_same_vocabulary


def start_trial(options: LoadOptions, pair: ModelPair) -> FileTrial:
    """Check the headers of the models to open, and start to try those of unknown contents in a child process.

    Raises ModelNotFound, ModelFileError, and CapabilityError when the pair lacks what the options need.
    """
    models = [pair.files[role] for role in Chosen.of(options, pair).roles]
    models = [each for each in models if not (each.is_gguf and each.engine == "onnx")]  # read by nobody but us
    return FileTrial({model.path: all(file.sha256 for file in model.all_files) for model in models})


def open_models(options: LoadOptions, pair: ModelPair, trial: FileTrial) -> tuple[Engine, dict[DrafterName, Drafter]]:
    """The target of `pair`, loaded, and the drafters that own a model. `trial`: of its models, from `start_trial`.

    Raises ModelNotFound, ModelFileError, VocabularyMismatch (naming the first token that differs), CapabilityError when
    something is not possible, ConfigError for options that do not fit the engine, and MemoryError.
    """
    chosen = Chosen.of(options, pair)
    for file in (*(pair.files[role] for role in chosen.roles), *pair.heads.values()):
        for part in file.all_files:  # a graph with damaged weights loads without an error
            check_hash(part)
    for engine in {pair.files[role].engine for role in chosen.roles}:  # while the child works
        import_module(f"edgespec.engines.{engine}.library").library()
    heads = read_heads(options, pair)
    trial.require_sound()
    target = open_target(options, chosen, heads.values())
    drafters: dict[DrafterName, Drafter] = {}
    try:
        for name in chosen.wanted:
            _open_drafter(name, options, chosen, target, drafters)
        drafters |= {each.manifest.kind: open_heads(each, path, target) for path, each in heads.items()}
    except BaseException:
        for drafter in drafters.values():
            drafter.close()
        target.close()
        raise
    return target, drafters


def _open_drafter(
    name: DrafterName, options: LoadOptions, chosen: Chosen, target: Engine, opened: dict[DrafterName, Drafter]
) -> None:
    """Add the drafters with models for `name` to those that are `opened`."""
    if name == "early-exit":
        from edgespec.engines.onnx.kernel_engine import KernelEngine

        assert isinstance(target, KernelEngine)  # the table of drafters leaves GGUFs on kernels only
        assert options.exit_layer is not None
        opened[name] = EarlyExitDrafter(target.first_layers(options.exit_layer, options.draft_context_length))
        return
    if name in HEAD_FILES:
        opened[name] = _open_head(options, chosen, target)
        return
    # An exit is a draft model already: no second one is opened beside it.
    small = next((each for each in opened.values() if isinstance(each, ModelDrafter)), None)
    if small is None:
        file = chosen.pair.files["draft"]
        engine = open_draft(options, file, target)
        with closed_on_failure(engine):
            cache, note = draft_cache(target, engine, file.path.name)
        opened["model"] = small = ModelDrafter(engine, cache, (note,) if note else ())
    if name == "hierarchical":
        medium = open_draft(options, chosen.pair.files["medium"], target)
        with closed_on_failure(medium):
            check_same_vocabulary(target.vocabulary, medium.vocabulary)
        opened[name] = HierarchicalDrafter(small, medium)


def has_chat_template(file: ModelFile) -> bool:
    """Whether a model comes with a chat template; reads the header of a GGUF, or the files beside an ONNX graph.

    True where the files cannot be read: loading says better what is wrong with them. Raises ModelFileError for a GGUF
    that writes no text, such as a model that only gives embeddings.
    """
    try:
        if not file.is_gguf:
            from edgespec.engines.onnx.tokenizer import read_chat_template

            return read_chat_template(file.path.parent) is not None
        model_files(file.path)  # a part of a model holds no template, and says which file to open
        header = read_header(file.path)
    except (UsageError, OSError):
        return True
    require_language_model(file.path, header)
    return bool(header.metadata.get("tokenizer.chat_template"))


def open_target(options: LoadOptions, chosen: Chosen, heads: Collection[HeadFile]) -> Engine:
    """The target, with the hidden states that `heads` and a head in the pair's draft file read.

    Raises as `open_engine`.
    """
    file = chosen.pair.files["target"]
    if file.is_gguf and options.provider not in ("auto", "cpu"):
        raise ConfigError(
            f"--provider {options.provider} is for ONNX models (--engine onnx, where a pair has both); layers of a "
            "GGUF go to a GPU with -ngl"
        )
    layers = {layer for each in heads for layer in each.manifest.layers}
    if reads := file.engine == "onnx" and not HEAD_FILES.keys().isdisjoint(chosen.wanted):
        layers |= set(() if chosen.has_own_mtp else read_head(chosen.pair.files["draft"].path).layers)
    states = tuple(sorted(layers))
    use = replace(target_use(options, chosen), hidden_states=bool(heads) or reads, state_layers=states)
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
    found: Engine
    if file.engine == "onnx":
        from edgespec.engines.onnx import OnnxEngine

        _check_for_onnx(options, use)
        found = OnnxEngine.load(file.path, use)
    elif gives_only_embeddings(check_gguf(file.path)):
        from edgespec.engines.llamacpp.embeddings import EncoderEngine

        found = EncoderEngine.load(file.path, use)
    else:
        from edgespec.engines.llamacpp.engine import LlamaCppEngine
        from edgespec.engines.llamacpp.remote import RemoteEngine

        found = (RemoteEngine if use.endpoints else LlamaCppEngine).load(file.path, use)
    if file.note:
        found.facts = replace(found.facts, notes=(*found.facts.notes, file.note))
    return found


def _check_for_onnx(options: LoadOptions, use: ModelUse) -> None:
    given = {"-ngl": options.gpu_layers, "--device": options.device, "--rpc": options.rpc}
    given["--override-tensor"] = options.override_tensor
    for flag, value in given.items():
        if value:
            raise ConfigError(f"{flag} {value} is for llama.cpp; the device of an ONNX model is set with --provider")
    if use.cache_type_k != use.cache_type_v:
        raise ConfigError("this model caches keys and values in one type: give -ctk and -ctv the same")


# Heads on a target's states: read from their files and checked against the loaded target.

_DRAFTERS: dict[HeadForm, type[HeadDrafter]] = {
    "eagle3": Eagle3Drafter,
    "dflash": DFlashDrafter,
    "mtp": MtpDrafter,
    "gemma4": Gemma4Drafter,
}


def read_heads(options: LoadOptions, pair: ModelPair) -> dict[Path, HeadFile]:
    """The heads in `head_paths`.

    Raises CapabilityError where the chosen drafter has no heads or the target gives no states, ModelFileError for a
    damaged file.
    """
    paths = head_paths(options, pair)
    found = {path: read_head_file(path) for path in paths}
    if options.drafter in HEAD_KINDS and options.drafter not in {each.manifest.kind for each in found.values()}:
        has = f"{paths[0].name} holds {found[paths[0]].manifest.kind} heads" if paths else f"{pair.name!r} has none"
        raise CapabilityError(
            f"drafter {options.drafter!r} needs a heads file, and {has}: give --heads FILE, made by "
            f"scripts/train/heads.py --kind {options.drafter}"
        )
    return found


def open_heads(heads: HeadFile, path: Path, target: Engine) -> Drafter:
    """A drafter with these heads. Raises ModelFileError when they were trained for another target."""
    manifest, vocabulary = heads.manifest, target.vocabulary
    if manifest.vocabulary_size > vocabulary.size or not heads.is_of(_probed(heads, target)):
        raise ModelFileError(
            f"{path} holds heads for another target ({manifest.target}, hidden size {manifest.feature_size}, "
            f"{manifest.vocabulary_size} tokens): give the file that was trained for this one"
        )
    from edgespec.engines.onnx.file_heads import load_eagle, load_medusa

    if manifest.kind == "medusa":
        return MedusaDrafter(load_medusa(heads, vocabulary, target.state_layers), WINDOW)
    sequences = target.facts.max_sequences
    return EagleDrafter(load_eagle(heads, vocabulary, target.state_layers, sequences=sequences), WINDOW)


def _probed(heads: HeadFile, target: Engine) -> NDArray[np.float32]:
    """The states of `target` for the probe tokens that identify the heads' own; leaves its cache empty."""
    from edgespec.engines.onnx.file_heads import columns_of

    target.give_hidden_states(True)
    try:
        target.forward(Batch.chain(heads.probe_ids))
        return target.hidden_states()[:, columns_of(heads, target.state_layers)]
    finally:
        target.rollback(0)
        target.give_hidden_states(False)


def _open_head(options: LoadOptions, chosen: Chosen, target: Engine) -> Drafter:
    """A drafter with the head in the pair's draft file, or with the multi-token prediction layer of the target's own.

    Raises CapabilityError for a target that it cannot read.
    """
    path, length = None if chosen.has_own_mtp else chosen.pair.files["draft"].path, options.draft_context_length
    form = read_head(path).form if path is not None else "mtp"
    if target.facts.name == "onnx":
        from edgespec.engines.onnx.kernel_engine import KernelEngine
        from edgespec.engines.onnx.kernel_head import load_drafter

        assert isinstance(target, KernelEngine)  # the table of drafters leaves GGUFs on kernels only
        return _DRAFTERS[form](load_drafter(target, path, length), WINDOW)
    from edgespec.engines.llamacpp.engine import LlamaCppEngine

    if not isinstance(target, LlamaCppEngine):
        raise CapabilityError(
            "a draft head in GGUF reads the target's states in this process: with --rpc use another drafter, such as "
            "--drafter ngram"
        )
    head = target.load_head(path, context_length=length, gpu_layers=options.draft_model_gpu_layers)
    return _DRAFTERS[head.form](head, WINDOW)

"""Heads on a target's states: read from their files and checked against the loaded target."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.closing import closed_on_failure
from edgespec.config.options import LoadOptions
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
from edgespec.engines.base import Engine
from edgespec.engines.features import WINDOW
from edgespec.engines.file_heads import MedusaHead, columns_of
from edgespec.engines.head import DraftHead
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.gguf.check import HEAD_NAMES, is_gemma4_drafter
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import HeadForm, head_kind_of
from edgespec.formats.head_file import HeadFile, read_head_file
from edgespec.formats.manifest import HEAD_KINDS, ModelFile, ModelPair
from edgespec.loading.requirements import head_paths
from edgespec.types import Batch

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


def state_layers(heads: Iterable[HeadFile]) -> tuple[int, ...]:
    """The target's layers whose inputs any of `heads` reads."""
    return tuple(sorted({layer for each in heads for layer in each.manifest.layers}))


def open_heads(heads: HeadFile, path: Path, target: Engine) -> Drafter:
    """A drafter with these heads. Raises ModelFileError when they were trained for another target."""
    manifest, vocabulary = heads.manifest, target.vocabulary
    if manifest.vocabulary_size > vocabulary.size or not heads.is_of(_probed(heads, target)):
        raise ModelFileError(
            f"{path} holds heads for another target ({manifest.target}, hidden size {manifest.feature_size}, "
            f"{manifest.vocabulary_size} tokens): give the file that was trained for this one"
        )
    if manifest.kind == "medusa":
        return MedusaDrafter(MedusaHead(heads, vocabulary, target.state_layers), WINDOW)
    from edgespec.engines.onnx.eagle import load_eagle

    sequences = target.facts.max_sequences
    return EagleDrafter(load_eagle(heads, vocabulary, target.state_layers, sequences=sequences), WINDOW)


def _probed(heads: HeadFile, target: Engine) -> NDArray[np.float32]:
    """The states of `target` for the probe tokens that identify the heads' own; leaves its cache empty."""
    target.give_hidden_states(True)
    try:
        target.forward(Batch.chain(heads.probe_ids))
        columns = columns_of(heads, target.state_layers)
        states = target.hidden_states()
        return states.copy() if columns is None else states[:, columns]
    finally:
        target.rollback(0)
        target.give_hidden_states(False)


def open_own_layers(options: LoadOptions, target: Engine) -> MtpDrafter:
    """A drafter with the multi-token prediction layer of `target`, which was loaded with it. Raises CapabilityError."""
    if target.facts.name == "onnx":
        return MtpDrafter(_on_kernels(options, target), WINDOW)
    from edgespec.engines.llamacpp.engine import LlamaCppEngine

    assert isinstance(target, LlamaCppEngine)
    return MtpDrafter(target.load_mtp(context_length=options.draft_context_length), WINDOW)


def _on_kernels(options: LoadOptions, target: Engine, path: Path | None = None) -> DraftHead:
    """The target's own layer, or the head in `path`."""
    from edgespec.engines.onnx.kernel_engine import KernelEngine
    from edgespec.engines.onnx.kernel_head import load_drafter

    assert isinstance(target, KernelEngine)  # the table of drafters leaves GGUFs on kernels only
    return load_drafter(target, path, options.draft_context_length)


def open_head_file(options: LoadOptions, file: ModelFile, target: Engine) -> Drafter:
    """A drafter with a head in GGUF. Raises CapabilityError for a target that it cannot read."""
    from edgespec.engines.llamacpp.engine import LlamaCppEngine

    kind = head_kind_of(file.path)
    assert kind is not None  # the pair's requirements have asked
    if target.facts.name == "onnx":
        form: HeadForm = "gemma4" if is_gemma4_drafter(read_header(file.path)) else "mtp"
        return _DRAFTERS[form](_on_kernels(options, target, file.path), WINDOW)
    if not isinstance(target, LlamaCppEngine):  # the table of drafters leaves this one only
        raise CapabilityError(
            f"{file.path.name} is {HEAD_NAMES[kind]}, which reads the target's states in this process: with --rpc use "
            "another drafter, such as --drafter ngram"
        )
    head = target.load_head(
        file.path, context_length=options.draft_context_length, gpu_layers=options.draft_model_gpu_layers
    )
    with closed_on_failure(head):  # here, before any text, if the target cannot give what it reads
        target.give_layer_inputs(head.facts.layers)
        target.give_layer_inputs(())
    return _DRAFTERS[head.form](head, WINDOW)

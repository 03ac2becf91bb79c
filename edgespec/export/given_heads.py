"""Heads as the draft of a pair, made by `edgespec train-heads` or shipped: the file goes into the pair as it is."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from edgespec.config.options import LoadOptions
from edgespec.config.values import DrafterName, EngineName
from edgespec.errors import ConfigError, ModelFileError
from edgespec.export.accuracy import ExportRefused
from edgespec.export.request import ExportRequest
from edgespec.export.stages import Artefact, Stage
from edgespec.export.workspace import Workspace
from edgespec.formats.head_file import HeadFile, read_head_file
from edgespec.formats.manifest import HEADS
from edgespec.loading.opening import open_models
from edgespec.platform.files import atomic_file
from edgespec.types import Progress

logger = logging.getLogger("edgespec")
STAGE = "heads"
CHECK_CONTEXT = 64  # tokens; the probe of a heads file has fewer


def check_given_heads(path: Path, num_layers: int, vocabulary_size: int) -> HeadFile:
    """The heads in `path`, for a target of these sizes. Raises ModelNotFound, ModelFileError, and ConfigError for heads
    of a larger target."""
    heads = read_head_file(path)
    manifest = heads.manifest
    if manifest.vocabulary_size > vocabulary_size or max(manifest.layers, default=0) >= num_layers:
        reads = f", layers {', '.join(map(str, manifest.layers))}" if manifest.layers else ""
        raise ConfigError(
            f"--draft {path} holds heads for another target ({manifest.target}: {manifest.vocabulary_size} tokens"
            f"{reads}), and this one has {vocabulary_size} tokens and {num_layers} layers: give the file that edgespec "
            "train-heads made for it"
        )
    return heads


def heads_stages(request: ExportRequest, workspace: Workspace) -> Iterator[Stage]:
    """The stage that copies the heads of `request` into the pair; none without heads."""
    if request.heads is None:
        return
    source, kind = request.heads, read_head_file(request.heads).manifest.kind

    def copied(_progress: Progress) -> list[Artefact]:
        path = workspace.pair / HEADS / f"{kind}.npz"
        path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as temporary:
            shutil.copyfile(source, temporary)
        return [Artefact(STAGE, request.formats[0], kind, "as given", f"{HEADS}/{path.name}")]

    yield Stage(STAGE, f"{kind} heads", copied)


def check_fit(request: ExportRequest, pair: Path, engine: EngineName) -> None:
    """Raises ExportRefused unless the heads in the finished folder `pair` read the states of its target."""
    if request.heads is None or not request.check:
        return
    drafter: DrafterName = read_head_file(request.heads).manifest.kind
    options = LoadOptions(
        model=str(pair), engine=engine, drafter=drafter, context_length=CHECK_CONTEXT, reproducible=False
    )
    try:
        _, target, drafters = open_models(options)
    except ModelFileError as exc:
        raise ExportRefused(f"--draft {request.heads} does not fit what was made of {request.source}: {exc}") from exc
    for made in drafters.values():
        made.close()
    target.close()

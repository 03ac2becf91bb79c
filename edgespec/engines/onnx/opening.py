"""Opens an ONNX model: its session and caches, and what its first passes show."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.engines.base import Engine
from edgespec.engines.onnx.devices import HALF_ONLY, adapted
from edgespec.engines.onnx.graph import Graph, read_graph
from edgespec.engines.onnx.library import device_identity, version
from edgespec.engines.onnx.passes import ConcatenatedPasses, Passes, SharedPasses
from edgespec.engines.onnx.sessions import open_session, providers_for, try_graph
from edgespec.engines.onnx.settings import CONFIGS, OnnxSettings
from edgespec.engines.onnx.source import ExportFolder, Source, open_source
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.engines.proof import PREFIX
from edgespec.engines.rows import fault_of
from edgespec.engines.widths import METHOD
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.platform.machine import processor
from edgespec.types import Batch

Opened = tuple[Passes, str, Graph]  # on which provider they run, and the graph as that one runs it


def all_files(path: Path) -> list[Path]:
    """All files that a model is opened from."""
    named = (path.parent / name for name in (*CONFIGS, "tokenizer.json", "tokenizer_config.json"))
    return [*ExportFolder(path).files, *(file for file in named if file.is_file())]


def try_folder(path: Path) -> None:
    """In a trial process: read everything that may end one. Raises EdgespecError for a model that cannot be used.

    It runs no pass: without packed weights one takes 17 s on a model of 1.2 billion weights, and packing them takes as
    long as the load itself. `OnnxEngine.load` checks the logits of its first pass instead.
    """
    source = open_source(path)
    graph = read_graph(source)
    source.config()
    try_graph(graph.serialised, path.parent)
    vocabulary = TokenizerFile(path.parent, graph.vocabulary_size)
    vocabulary.encode("".join(map(chr, range(256))), parse_special=True)
    _ = vocabulary.pieces


def open_passes(source: Source, graph: Graph, settings: OnnxSettings, run_options: Any) -> Opened:
    """On the provider of `settings`, or on the best one that can run the whole graph.

    Raises as `providers_for` and `adapted`, ModelFileError and CapabilityError as `open_session`.
    """
    names = providers_for(settings.provider)
    for name in names[:-1]:
        if name in HALF_ONLY and graph.is_shared and not graph.is_half:
            continue  # casting its attention was checked on processors only, so far: for those who ask for it
        with suppress(CapabilityError):  # the next one may have what this one lacks
            return _open_on(name, source, graph, settings, run_options)
    return _open_on(names[-1], source, graph, settings, run_options)


def _open_on(provider: str, source: Source, graph: Graph, settings: OnnxSettings, run_options: Any) -> Opened:
    settings = replace(settings, provider=provider)
    graph = adapted(graph, provider, settings.head_size)
    arrays = source.arrays(graph.cells)
    session = open_session(graph.serialised, source.folder, threads=settings.threads, provider=provider, arrays=arrays)
    kind = SharedPasses if graph.is_shared else ConcatenatedPasses
    return kind(session, graph, run_options, settings), provider, graph


def widths_key(source: Source, settings: OnnxSettings, provider: str, widest: int, states: object) -> str:
    """The cache key of measured width classes: files, machine, device, library and settings."""
    kernels = (
        settings.threads,
        provider,
        device_identity(provider),
        states,
    )
    measured = (widest, settings.context_length > PREFIX + widest)
    return key_of(METHOD, "onnx chains", *map(file_key, source.files), version(), processor(), kernels, measured)


def check_logits(engine: Engine, path: Path) -> None:
    """Raises ModelFileError where the weights are damaged, and closes the engine; else leaves it empty."""
    count = min(2, engine.facts.max_batch, engine.vocabulary.size)
    if fault := fault_of(engine.forward(Batch.chain(list(range(count))))):
        engine.close()
        raise ModelFileError(f"{path} is not a usable model: {fault}. Download or export it again")
    engine.rollback(0)

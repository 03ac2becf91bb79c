"""Opens an ONNX model: its session, its caches, the scales of an int8 cache, and the key of its measurements."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgespec.engines.onnx.calibration import TEXT, are_plausible, as_scales, measure_scales
from edgespec.engines.onnx.concatenated import ConcatenatedPasses
from edgespec.engines.onnx.cuda import HALF_ONLY, adapted
from edgespec.engines.onnx.exits import ExitPasses
from edgespec.engines.onnx.graph import Graph, read_graph, with_sliced_bias
from edgespec.engines.onnx.library import Device, device_identity, run_options, version
from edgespec.engines.onnx.passes import Passes, SharedPasses
from edgespec.engines.onnx.rewriting import CacheScales
from edgespec.engines.onnx.sessions import providers_for, try_graph
from edgespec.engines.onnx.settings import CONFIGS, OnnxSettings
from edgespec.engines.onnx.source import ExportFolder, Source, open_source
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.engines.onnx.waiting import open_sessions
from edgespec.engines.proof import PREFIX
from edgespec.engines.widths import METHOD
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.platform.machine import processor
from edgespec.platform.memory import return_freed_memory

NO_INT8_CACHE = "an int8 cache needs GroupQueryAttention; this export concatenates its cache, use f32"


class Opened(NamedTuple):
    """The passes of a model, where they run, and the graph as that device runs it."""

    passes: Passes
    device: Device
    graph: Graph


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

    Raises as `providers_for` and `adapted`, ModelFileError and CapabilityError as `open_session`, and with an exit
    layer as `partition`.
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
    if provider == "cpu":
        graph = with_sliced_bias(graph)
    if settings.exit_layer is not None:
        parts = ExitPasses(source, graph, settings, run_options, settings.exit_layer)
        return Opened(parts, parts.device, graph)
    sessions, device = open_sessions(graph, source, settings)
    kind = SharedPasses if graph.is_shared else ConcatenatedPasses
    return Opened(kind(sessions, graph, device, run_options, settings), device, graph)


def cache_scales(source: Source, graph: Graph, settings: OnnxSettings) -> CacheScales:
    """Measured once per file, on a text, with the export's own cache type."""
    if not graph.is_shared:
        raise CapabilityError(NO_INT8_CACHE)
    key = key_of("cache scales", TEXT, *map(file_key, source.files), version())
    measured = disk_cache.get("cache-scales", key, dict[str, list[list[float]]])
    if measured is None or not are_plausible(measured, graph, settings.head_size):
        measured = _measured_scales(source, graph, settings)
        return_freed_memory()  # a whole session was freed, and another one is made next
        if not are_plausible(measured, graph, settings.head_size):
            raise ModelFileError(
                f"the keys and values of {source.path} are not plausible numbers: export the model again"
            )
        disk_cache.put("cache-scales", key, measured)
    return as_scales(measured)


def _measured_scales(source: Source, graph: Graph, settings: OnnxSettings) -> Any:
    """In a session of its own, which is closed again."""
    passes, _, graph = open_passes(source, graph, replace(settings, exit_layer=None), run_options())
    assert isinstance(passes, SharedPasses)
    ids = TokenizerFile(source.folder, graph.vocabulary_size).encode(TEXT)[: settings.context_length]
    return measure_scales(passes, graph, np.array(ids, np.int32))


def widths_key(source: Source, settings: OnnxSettings, provider: str, widest: int, states: object) -> str:
    """The cache key of measured width classes: files, machine, device, library and settings."""
    kernels = (settings.threads, provider, device_identity(provider), settings.cache_type, settings.exit_layer, states)
    measured = (widest, settings.context_length > PREFIX + widest)
    return key_of(METHOD, "onnx", *map(file_key, source.files), version(), processor(), kernels, measured)

"""The ONNX Runtime engine on its own kernels: chains only, and a cache for each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import EarlyExit, EngineFacts
from edgespec.engines.model_files import HeldFiles, StateStamp
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx.caches import Caches
from edgespec.engines.onnx.devices import widest_correct
from edgespec.engines.onnx.exits import ExitPasses, OnnxExit
from edgespec.engines.onnx.graph import Graph, read_graph
from edgespec.engines.onnx.hybrid_engine import HybridEngine
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.engines.onnx.library import device_identity, run_options, version
from edgespec.engines.onnx.opening import batches_work, cache_scales, check_logits, open_passes, widths_key
from edgespec.engines.onnx.passes import cache_name
from edgespec.engines.onnx.session_engine import SessionEngine
from edgespec.engines.onnx.sessions import providers_for, reason
from edgespec.engines.onnx.settings import ModelConfig, OnnxSettings
from edgespec.engines.onnx.source import Source, open_source
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.engines.rows import SequenceBook, SequenceRows
from edgespec.engines.widths import fastest_facts, pinned_facts
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.types import Batch, Logits


class OnnxEngine(SessionEngine):
    """On ONNX Runtime's own kernels. Make it with `load`, which also makes those on ours."""

    def __init__(self, source: Source, graph: Graph, settings: OnnxSettings, config: ModelConfig) -> None:
        self._options = run_options()
        self._max_outputs = settings.max_outputs(graph.vocabulary_size)
        exported = graph
        passes, device, graph = open_passes(source, exported, settings, self._options)
        self.vocabulary = TokenizerFile(source.folder, graph.vocabulary_size)
        self._sessions = passes.sessions
        self.thread_change_s = sum(sessions.make_s for sessions in self._sessions)
        self.thread_change_bytes = graph.weight_bytes
        self._exit_passes = passes if isinstance(passes, ExitPasses) else None
        max_batch = min(settings.max_batch, settings.context_length)
        widest = max_batch
        if device.provider != "cpu":
            tried = passes, source.files, device.provider, graph.vocabulary_size, max_batch, settings.exit_layer
            widest = widest_correct(*tried)
        self._caches = Caches(passes, settings.max_sequences, settings.edge)
        self._has_hidden = graph.hidden_size is not None
        self._book = SequenceBook(settings.max_sequences)
        self._last_width = 0
        self._held = HeldFiles(source.mapped)
        kinds = device.provider, cache_name(graph), settings.exit_layer
        self._stamp = StateStamp.of("onnx", source.files, version(), *kinds)
        self.facts = EngineFacts(
            name="onnx",
            architecture=config.architecture,
            context_length=settings.context_length,
            max_sequences=settings.max_sequences,
            max_batch=widest,
            can_rollback=True,
            can_tree=False,
            weight_bytes=source.weight_bytes(graph),
            kv_bytes_per_token=passes.bytes_per_token,
            width_classes=(),
            pinned_class=None,
            device=device.provider,
            threads=settings.threads,
            can_pack=self._caches.has_batches,
            splits_passes=self._caches.has_batches,
            own_cells=True,
            notes=tuple(_device_notes(device.provider, widest, max_batch, is_cast=graph.is_half > exported.is_half)),
            placement=device_identity(device.provider),
        )

    @classmethod
    def load(cls, path: Path, use: ModelUse | None = None, **changes: Any) -> OnnxEngine | KernelEngine:
        """Load `path` (model.onnx, its weights and tokenizer beside it) and measure what it can do.

        `changes`: of `use`. Of several sequences only single rows share a pass, and no drafts.

        Raises ModelNotFound, ModelFileError, ConfigError for an option out of range, CapabilityError when this build
        or model cannot do what was asked.
        """
        use = replace(use or ModelUse(), **changes)
        try:
            source = open_source(path)
            read = partial(read_graph, source, hidden_states=use.hidden_states, state_layers=use.state_layers)
            graph, config = read(), source.config()
        except OSError as exc:
            raise ModelFileError(f"{path.parent} cannot be read: {exc.strerror or exc}") from exc
        settings = OnnxSettings.checked(graph, config, use)
        if graph.head_sizes:
            if source.max_positions is not None:  # its rotary tables are made as long as they are needed
                graph = read(cells=settings.context_length)
            return _load_on_kernels(source, graph, settings, config, use)
        cells, reproducible = settings.cells, use.reproducible
        if graph.max_positions is not None and graph.max_positions < cells:
            graph = read(cells=cells)
        if settings.cache_type == "int8":
            graph = read(cache_scales(source, graph, settings), cells)
        engine = cls(source, graph, settings, config)
        engine.state_layers = use.state_layers
        check_logits(engine, path)
        if engine.facts.splits_passes and not batches_work(engine):
            engine._caches.never_batch()
            engine.facts = replace(engine.facts, can_pack=False, splits_passes=False)
        gives = use.state_layers or use.hidden_states
        widest = min(settings.measured_widths, engine.facts.max_batch)  # a device may compute less than was asked for
        key = "" if reproducible is False else widths_key(source, settings, engine.facts.device, widest, gives)
        if reproducible:
            advice = "Use --no-reproducible, or another export (w8a8, int8, int4)"
            engine.facts = pinned_facts(engine, key, widest=widest, advice=advice)
            assert engine.facts.pinned_class is not None
            engine._pad_to(engine.facts.pinned_class[0])
        elif reproducible is None:
            engine.facts = fastest_facts(engine, key)
        return engine

    def drop_class(self) -> None:
        super().drop_class()
        self._pad_to(1)

    def _pad_to(self, rows: int) -> None:
        self._caches.least_rows = rows
        if self._exit_passes is not None:
            self._exit_passes.least_rows = rows

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        if any(part.is_tree for part in placed.values()):
            raise CapabilityError(
                "ONNX Runtime's own kernels score chains only: trees need a GGUF, or an export to one of its types"
            )
        self._held.check()
        logits = self._caches.run(batch, placed)
        self._last_width = batch.width
        return logits

    def _truncate(self, to_length: int, sequence: int) -> None:
        self._caches.truncate(sequence, to_length)

    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        """The path of a chain is its beginning, which is in place."""

    def _copy(self, source: int, destination: int) -> None:
        self._book.settle(destination, 0)
        self._caches.fork(source, destination, self._book.lengths[source])

    def _state(self, sequence: int) -> bytes:
        return self._caches.save(sequence, self._book.lengths[sequence])

    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        self._book.settle(sequence, 0)
        self._caches.load(sequence, state, length)

    def hidden_states(self) -> NDArray[np.float32]:
        self._require_open()
        return self._caches.hidden(self._last_width)

    def early_exit(self) -> EarlyExit:
        self._require_open()
        if self._exit_passes is None:
            return super().early_exit()
        return OnnxExit(self._exit_passes, self._book.lengths, self._caches, self.widest_pass)

    def _free(self) -> None:
        super()._free()
        del self._caches  # they hold the sessions too
        self._exit_passes = None


def _device_notes(provider: str, widest: int, asked: int, *, is_cast: bool) -> Iterator[str]:
    """What the user should know of the device."""
    if is_cast:
        yield "attention is computed in float16 on this device, and cached keys and values are at most 16 bits"
    if widest < asked:
        yield f"{provider} gives wrong results for more than {widest} rows at once here: prompts take longer"


def _load_on_kernels(
    source: Source, graph: Graph, settings: OnnxSettings, config: ModelConfig, use: ModelUse
) -> KernelEngine:
    if "cpu" not in providers_for(settings.provider):
        raise CapabilityError(
            f"this model cannot run on {settings.provider}: {reason(settings.provider, graph.serialised, '')}. Use "
            "--provider cpu"
        )
    kind = HybridEngine if graph.states else KernelEngine
    engine = kind(source, graph, replace(settings, provider="cpu"), config)
    engine.state_layers = use.state_layers
    check_logits(engine, source.path)
    return engine

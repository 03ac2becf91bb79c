"""The ONNX Runtime engine on its own kernels: chains only, and a cache for each sequence.

A sequence's bits depend on its own tokens alone, and what others hold does not slow it down: sequences of a batch go
through the model one after another. In reproducible mode passes are padded into the width class.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.closing import closed_on_failure
from edgespec.engines.base import EngineFacts
from edgespec.engines.model_files import HeldFiles, StateStamp
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx.devices import check_device
from edgespec.engines.onnx.graph import Graph, read_graph
from edgespec.engines.onnx.hybrid_engine import HybridEngine
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.engines.onnx.library import device_identity, run_options, version
from edgespec.engines.onnx.opening import check_logits, open_passes, widths_key
from edgespec.engines.onnx.passes import PassRows
from edgespec.engines.onnx.session_engine import SessionEngine
from edgespec.engines.onnx.sessions import providers_for, reason
from edgespec.engines.onnx.settings import VALUES_AT_ONCE, ModelConfig, OnnxSettings
from edgespec.engines.onnx.source import Source, open_source
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.engines.rows import SequenceBook, SequenceRows
from edgespec.engines.widths import pinned_facts
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.types import Batch, Logits

CAST_NOTE = "attention is computed in float16 on this device, and cached keys and values are at most 16 bits"


class OnnxEngine(SessionEngine):
    """On ONNX Runtime's own kernels. Make it with `load`, which also makes those on ours."""

    def __init__(self, source: Source, graph: Graph, settings: OnnxSettings, config: ModelConfig) -> None:
        self._options = run_options()
        self._max_outputs = settings.max_outputs(graph.vocabulary_size)
        exported = graph
        passes, provider, graph = open_passes(source, exported, settings, self._options)
        self.vocabulary = TokenizerFile(source.folder, graph.vocabulary_size)
        self._passes = passes
        self._least_rows = 1  # narrower passes are padded
        self._ids = np.zeros((settings.max_sequences, passes.capacity), np.int32)  # in the cells of each sequence
        self._gathered = np.zeros((0, graph.vocabulary_size), np.float32)
        self._shift = 0  # rows of the last pass before those that were asked for
        self._states: NDArray[np.float32] | None = None  # of the last batch, if several passes gave them
        self._has_hidden = graph.hidden_size is not None
        self._book = SequenceBook(settings.max_sequences)
        self._last_width = 0
        self._held = HeldFiles(source.mapped)
        self._stamp = StateStamp.of("onnx", source.files, version(), provider, graph.cache[0].element_type)
        self.facts = EngineFacts(
            name="onnx",
            architecture=config.architecture,
            context_length=settings.context_length,
            max_sequences=settings.max_sequences,
            max_batch=min(settings.max_batch, settings.context_length),
            can_rollback=True,
            weight_bytes=source.weight_bytes(graph),
            kv_bytes_per_token=passes.bytes_per_token,
            pinned_class=None,
            device=provider,
            threads=settings.threads,
            own_cells=True,
            notes=(CAST_NOTE,) if graph.is_half > exported.is_half else (),
            placement=device_identity(provider),
        )

    @classmethod
    def load(cls, path: Path, use: ModelUse | None = None, **changes: Any) -> OnnxEngine | KernelEngine:
        """Load `path` (model.onnx, its weights and tokenizer beside it) and measure what it can do.

        `changes`: of `use`.

        Raises ModelNotFound, ModelFileError, ConfigError for an option out of range, CapabilityError when this build
        or model cannot do what was asked.
        """
        use = replace(use or ModelUse(), **changes)
        try:
            source = open_source(path, is_draft=use.is_draft)
            read = partial(read_graph, source, hidden_states=use.hidden_states, state_layers=use.state_layers)
            graph, config = read(), source.config()
        except OSError as exc:
            raise ModelFileError(f"{path.parent} cannot be read: {exc.strerror or exc}") from exc
        settings = OnnxSettings.checked(graph, config, use)
        if graph.head_sizes:
            if source.max_positions is not None:  # its rotary tables are made as long as they are needed
                graph = read(cells=settings.context_length)
            return _load_on_kernels(source, graph, settings, config, use)
        reproducible = use.reproducible
        engine = cls(source, graph, settings, config)
        engine.state_layers = use.state_layers
        check_logits(engine, path)
        if engine.facts.device != "cpu":
            with closed_on_failure(engine):
                check_device(engine)
        if engine.facts.device == "cpu" and not settings.has_classes:
            if reproducible:
                engine.close()
                raise CapabilityError(
                    f"{path} has no reproducible mode on this processor: its attention heads have {settings.head_size} "
                    f"values, ONNX Runtime's own kernels allow {VALUES_AT_ONCE} on x86, none elsewhere. Run the GGUF "
                    "that it was made from, export it as q8_0 or q4_k_m, or use --no-reproducible"
                )
            reproducible = False
        gives = use.state_layers or use.hidden_states
        if reproducible:
            widest = settings.measured_widths
            key = widths_key(source, settings, engine.facts.device, widest, gives)
            advice = "Use --no-reproducible, or another export (int8, int4)"
            engine.facts = pinned_facts(engine, key, widest=widest, advice=advice)
            assert engine.facts.pinned_class is not None
            engine._least_rows = engine.facts.pinned_class[0]
        return engine

    def drop_class(self) -> None:
        super().drop_class()
        self._least_rows = 1

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        if any(part.is_tree for part in placed.values()):
            raise CapabilityError(
                "ONNX Runtime's own kernels score chains only: trees need a GGUF, or an export to one of its types"
            )
        self._held.check()
        self._states = None
        if len(placed) == 1:
            ((sequence, part),) = placed.items()
            logits = self._run(sequence, part, batch.outputs)
        else:
            logits = self._run_several(batch, placed)
        self._last_width = batch.width
        return logits

    def _run_several(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        """Logits of the wanted rows of several sequences, in batch order."""
        states = np.zeros((batch.width, self._passes.hidden_size), np.float32) if self._passes.hidden_size else None
        count = int(np.count_nonzero(batch.outputs))
        if len(self._gathered) < count:
            self._gathered = np.zeros((count, self._gathered.shape[1]), np.float32)
        place = np.cumsum(batch.outputs) - 1
        for sequence, part in placed.items():
            wanted = batch.outputs[part.rows]
            self._gathered[place[np.array(part.rows)[wanted]]] = self._run(sequence, part, wanted)
            if states is not None:
                states[part.rows] = self._hidden(len(part.rows))
        self._states = states
        return self._gathered[:count]

    def _run(self, sequence: int, part: SequenceRows, wanted: NDArray[np.bool_]) -> Logits:
        """One pass over a chain, with at least `_least_rows` rows, with and without logits.

        Tokens before the chain are scored again, with the same bits, so that no cell after it is needed. Where there
        are too few, at the start of a text, scratch rows follow instead.
        """
        self._states = None
        missing = max(self._least_rows - len(part.rows), 0)
        shift = self._shift = missing if missing <= part.base else 0
        ids = part.token_ids
        if missing:
            before = self._ids[sequence, part.base - shift : part.base]
            ids = np.concatenate((before, ids, np.zeros(missing - shift, np.int32)))
        asked = np.flatnonzero(wanted)
        count = asked.size
        outputs = (asked if count else np.array([len(part.rows) - 1])) + shift  # one is computed in any case
        outputs = np.concatenate((outputs, np.repeat(outputs[-1:], max(self._least_rows - outputs.size, 0))))
        logits = self._passes.run(sequence, PassRows(part.base - shift, ids, outputs))
        self._ids[sequence, part.base : part.base + len(part.rows)] = part.token_ids
        return logits[:count]

    def _truncate(self, to_length: int, sequence: int) -> None:
        """Cells beyond a sequence's length are overwritten before they are read."""

    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        """The path of a chain is its beginning, which is in place."""

    def _copy(self, source: int, destination: int) -> None:
        self._book.settle(destination, 0)
        self._passes.copy(source, destination, self._book.lengths[source])
        self._ids[destination] = self._ids[source]

    def _state(self, sequence: int) -> bytes:
        length = self._book.lengths[sequence]
        return self._ids[sequence, :length].tobytes() + self._passes.read(sequence, length)

    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        self._book.settle(sequence, 0)
        self._ids[sequence, :length] = np.frombuffer(state, np.int32, length)
        self._passes.write(sequence, state[4 * length :])

    def hidden_states(self) -> NDArray[np.float32]:
        self._require_open()
        return self._hidden(self._last_width)

    def _hidden(self, width: int) -> NDArray[np.float32]:
        """Those of the last rows that were asked for, a view."""
        if self._states is not None:
            return self._states
        return self._passes.hidden()[self._shift : self._shift + width]

    def _free(self) -> None:
        self._held.close()
        del self._passes  # they hold the session too


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

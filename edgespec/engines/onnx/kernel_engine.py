"""The engine of models on our own kernels: all rows of all texts in one pass, each with the bits that it has alone.

Rows say where they belong (`formats.onnx.tiles.ROWS`), so a pass takes chains and trees of any sequences. The cache
(`KernelCache`) is memory of ours, which is touched only as far as texts reach.
Hybrids have layers with a running state beside those with keys and values. The kernels add a row to a state only when
later rows have been scored, so what a draft's rejected rows would have made of it never exists: dropping them costs
nothing, in trees as well, and leaves the bits of a text without drafts. Further back, a text returns to copies of its
states: at checkpoints, and before a wide pass that is cancelled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import check_threads
from edgespec.engines.booked import Checkpoints, SequenceRows
from edgespec.engines.model_use import DEFAULT_CONTEXT, MOST_CHECKPOINTS
from edgespec.engines.onnx.graph import OUTPUT_ROWS, Graph, read_graph
from edgespec.engines.onnx.library import Inputs, SessionEngine, Translated, bind_inputs, open_session
from edgespec.engines.onnx.settings import OnnxSettings
from edgespec.engines.onnx.source import GgufFile, GraphSource
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.errors import BatchError, CapabilityError, StateError
from edgespec.formats.onnx.tiles import CACHE, FEATURES, ROWS, STATES
from edgespec.kernels.interface import CHUNK, NO_FLOOR, KernelCache, KernelStates, StateSizes, kernels, states_bytes
from edgespec.types import Batch, Logits, TokenIds
from edgespec.vocabulary import Vocabulary


class KernelEngine(SessionEngine):
    """On our kernels. Made by `OnnxEngine.load`."""

    def __init__(
        self, source: GraphSource, graph: Graph, settings: OnnxSettings, vocabulary: Vocabulary | None = None
    ) -> None:
        """`vocabulary`: of its target, for a draft head.

        Raises CapabilityError for a device or a size that the kernels do not have.
        """
        kind, slots = settings.cache_type_k.upper(), settings.max_sequences
        self._cache = KernelCache(kind, graph.head_sizes, slots, num_chunks(settings.context_length))
        self._named = {CACHE: np.array([self._cache.number])}  # inputs that are the same in all passes
        session = open_session(graph.serialised, source.folder, arrays=source.arrays())
        widest = max(settings.max_rows, slots)
        super().__init__(
            session,
            source,
            graph,
            settings,
            vocabulary or TokenizerFile(source.folder, graph.vocabulary_size, source.path),
            (widest, settings.max_outputs(graph.vocabulary_size)),
            (kind, "kernels"),
            max_batch=settings.max_batch,
            max_branches=settings.max_batch,
            kv_bytes_per_token=self._cache.bytes_per_token,
            pinned_class=(1, settings.max_batch),
            row_cost=0.05,
            can_pack=slots > 1,
        )
        self.source, self._threads = source, settings.threads
        self._ids, self._rows = np.zeros(widest, np.int64), np.zeros((widest, 4), np.int32)
        self._outputs = np.zeros(self._max_outputs, np.int64)
        self._counting = np.arange(-1, settings.context_length + widest, dtype=np.int32)
        # Of a draft head: the states that the rows of the next pass read.
        self.features = np.zeros((widest if graph.feature_size else 0, graph.feature_size), np.float32)

    def set_threads(self, threads: int) -> bool:
        self._require_open()
        check_threads(threads, self.facts)
        self._threads = threads
        return self.facts.threads > 1

    def first_layers(self, count: int, context_length: int | None = None) -> KernelEngine:
        """An engine of the first `count` layers and the head, of the same tiles, with a cache of its own.

        `context_length`: as of a draft model. Raises CapabilityError, and ConfigError for a number of layers out of
        range.
        """
        if not isinstance(self.source, GgufFile):
            raise CapabilityError("the first layers of an export cannot draft: run the GGUF that it was made from")
        source = self.source.first_layers(count)
        length = min(context_length or DEFAULT_CONTEXT, self.facts.context_length)
        settings = replace(self.settings, context_length=length)
        return type(self)(source, read_graph(source, cells=length), settings, self.vocabulary)

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        self._ids[: batch.width] = batch.token_ids
        for sequence, part in placed.items():
            self._place(self._rows[part.rows], sequence, part)
        return self._run(batch.width, batch.outputs.nonzero()[0])  # np.flatnonzero calls eight functions of Python

    def score(self, token_ids: TokenIds, rows: NDArray[np.int32], first: int = 0, last: int | None = None) -> Logits:
        """Logits of the rows `first`..`last` of all `rows` [n, 4] of a draft head whose text they do not become."""
        self._require_open()
        count = len(rows)
        self._ids[:count], self._rows[:count] = token_ids, rows
        return self._run(count, np.arange(count)[first:last])

    def run_beside(self, session: Any, inputs: dict[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
        """The results of a graph of the same head, which `cancel` ends, too. Raises as a pass."""
        self._require_open()
        kernels().edgespec_use_threads(self._threads)
        given = {**inputs, **self._named} if ROWS in inputs else inputs
        with Translated(self._bindings.options):
            found: list[NDArray[np.float32]] = session.run(None, given, self._bindings.options)
        return found

    def read_cache_of(self, other: KernelEngine) -> None:
        """Attend to keys and values of another engine's cache, which lives as long."""
        self._named[CACHE] = other._named[CACHE]

    def _place(self, rows: NDArray[np.int32], sequence: int, part: SequenceRows) -> None:
        base, start, count = part.base, part.start, part.count
        rows[:, 0] = sequence
        rows[:, 2] = self._counting[base + 1 : base + 1 + count]  # the first number is -1
        if part.is_tree:
            rows[:, 1] = part.positions()
            rows[:, 3] = [parent + start if parent >= 0 else parent for parent in part.parents]
        else:
            rows[:, 1] = rows[:, 2]
            rows[:, 3] = self._counting[start : start + count]
            rows[0, 3] = -1

    def _run(self, width: int, outputs: NDArray[np.intp]) -> Logits:
        """Logits of the rows `outputs` of the pass that was filled in. One is computed where none is asked for."""
        count = max(outputs.size, 1)
        self._outputs[0] = 0
        self._outputs[: outputs.size] = outputs
        binding = self._bindings.of((width, count), self._bind)
        self._held.check()
        kernels().edgespec_use_threads(self._threads)
        self._bindings.run(binding)
        self._last_states = self._hidden[:width]
        return self._logits[: outputs.size]

    def _bind(self, binding: Any, width: int, count: int) -> None:
        inputs: Inputs = {
            "input_ids": ((1, width), self._ids),
            ROWS: ((width, 4), self._rows),
            OUTPUT_ROWS: ((count,), self._outputs),
            **{name: ((1,), number) for name, number in self._named.items()},
        }
        if len(self.features):
            inputs[FEATURES] = (1, width, self.features.shape[1]), self.features
        bind_inputs(binding, inputs)
        self._bind_results(binding, width, count)

    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        """The branch that is kept moves to the cells of its positions."""
        moved = [(position, row) for position, row in enumerate(path) if position != row]
        if moved:
            places, rows = (part.base + np.array(each, np.int32) for each in zip(*moved, strict=True))
            self._cache.write(sequence, places, self._cache.read(sequence, rows))

    def _copy(self, source: int, destination: int) -> None:
        self._book.settle(destination, 0)
        self._cache.copy(source, destination, self._book.lengths[source])

    def _state(self, sequence: int) -> memoryview:
        return self._cache.read(sequence, np.arange(self._book.lengths[sequence], dtype=np.int32)).data

    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        self._book.settle(sequence, 0)
        try:
            self._cache.write(sequence, np.arange(length, dtype=np.int32), np.frombuffer(state, np.uint8))
        except ValueError as exc:
            raise StateError(f"this saved sequence is damaged ({exc}); start from the prompt instead") from exc

    def _free(self) -> None:
        super()._free()
        del self.source  # it holds the weights, and cycles may hold this engine for long
        self._cache.close()


def num_chunks(context_length: int) -> int:
    """Chunks of cells for a text of so many tokens, and for the block that a DFlash head scores behind it."""
    return -(-(context_length + CHUNK // 4) // CHUNK)


LOG = 32  # rows of a pass that a text can drop


class HybridEngine(KernelEngine):
    """As `KernelEngine`; a text drops any of its last pass's rows, up to LOG, or returns to a checkpoint or to 0."""

    def __init__(
        self, source: GraphSource, graph: Graph, settings: OnnxSettings, vocabulary: Vocabulary | None = None
    ) -> None:
        super().__init__(source, graph, settings, vocabulary)
        self._states = KernelStates(graph.states, settings.max_sequences, LOG)
        self._named[STATES] = np.array([self._states.number])
        self._checkpoints = Checkpoints()
        self.facts = replace(self.facts, can_rollback=False, rollback_rows=LOG - 1, has_checkpoints=True)

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        for part in placed.values():
            if part.is_tree and part.count > LOG:
                raise BatchError(f"a tree of {part.count} rows was given, a {self.facts.architecture} takes {LOG}")
        before: dict[int, NDArray[np.uint8]] = {}
        for sequence, part in placed.items():
            if part.base + part.count - self._states.floors[sequence] > LOG:
                self._keep_floor(sequence)
            if part.base and part.count > LOG:  # its first rows are added at once
                before[sequence] = self._states.read(sequence, part.base)
        try:
            return super()._score(batch, placed)
        except BaseException:
            for sequence, state in before.items():
                self._states.write(sequence, placed[sequence].base, state)
            raise

    def _keep_floor(self, sequence: int) -> None:
        """Copy the state at the floor of a sequence, which then has none."""
        floor = int(self._states.floors[sequence])
        self._checkpoints.add(floor, sequence, lambda: self._states.read(sequence, floor))
        self._states.floors[sequence] = NO_FLOOR

    def _start(self, sequence: int) -> int:
        """The shortest length that the log of a sequence reaches."""
        return self._states.start(sequence) if self._book.lengths[sequence] else 0

    def _truncate(self, to_length: int, sequence: int) -> None:
        if 0 < to_length < self._start(sequence):
            state = self._checkpoints.at(to_length, sequence)
            if state is None:
                raise CapabilityError(
                    f"{self.facts.architecture} models keep a running state that cannot be rolled back to {to_length} "
                    f"of {self._book.lengths[sequence]} tokens, only to {self._start(sequence)} and more, or 0"
                )
            self._states.write(sequence, to_length, state)
        self._checkpoints.shorten(to_length, sequence)
        if to_length < self._states.floors[sequence]:
            self._states.floors[sequence] = NO_FLOOR

    def checkpoint(self, sequence: int = 0) -> None:
        """The length becomes the floor of the log, and its state is copied once the log has no room for both."""
        self._require_open()
        self._book.check_settled(sequence)
        if length := self._book.lengths[sequence]:
            self._states.floors[sequence] = length

    def reachable(self, to_length: int, sequence: int = 0) -> int:
        return to_length if to_length >= self._start(sequence) else self._checkpoints.latest(to_length, sequence)

    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        super()._keep(part, path, sequence)
        places = part.base + np.arange(len(path), dtype=np.int32)
        self._states.move(sequence, places, part.base + np.array(path, np.int32))

    def _copy(self, source: int, destination: int) -> None:
        super()._copy(source, destination)
        self._states.copy(source, destination)
        self._checkpoints.fork(source, destination)

    def _state(self, sequence: int) -> memoryview:
        keys_and_values, length = super()._state(sequence), self._book.lengths[sequence]
        if not length:
            return keys_and_values
        return np.concatenate([np.frombuffer(keys_and_values, np.uint8), self._states.read(sequence, length)]).data

    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        split = len(state) - self._states.state_bytes if length else len(state)
        if split < 0:
            raise StateError("this saved sequence is damaged: it has no running state; start from the prompt instead")
        super()._restore(state[:split], length, sequence)
        self._checkpoints.shorten(0, sequence)
        self._states.floors[sequence] = NO_FLOOR
        if length:
            self._states.write(sequence, length, np.frombuffer(state[split:], np.uint8))

    def _free(self) -> None:
        super()._free()
        self._states.close()


def running_bytes(states: tuple[StateSizes, ...], sequences: int) -> int:
    """Memory of the running states of so many sequences, with their checkpoints and a copy during a wide pass."""
    if not states:
        return 0
    copied = sum(
        4 * (each.value_heads * each.head_size * each.value_size + (each.taps - 1) * each.channels) for each in states
    )
    return (states_bytes(states, sequences, LOG) or 0) + sequences * (MOST_CHECKPOINTS + 1) * copied

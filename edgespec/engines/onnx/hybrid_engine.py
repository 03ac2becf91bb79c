"""The engine of hybrids on our own kernels: layers with a running state beside layers with keys and values.

The kernels add a row to a state only when later rows have been scored, so what a draft's rejected rows would have made
of it never exists: dropping them costs nothing, in trees as well, and leaves the bits of a text without drafts. Further
back, a text returns to copies of its states: at checkpoints, and before a wide pass that is cancelled.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.model_use import MOST_CHECKPOINTS
from edgespec.engines.onnx.graph import Graph
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.engines.onnx.settings import ModelConfig, OnnxSettings
from edgespec.engines.onnx.source import Source
from edgespec.engines.rows import Checkpoints, SequenceRows
from edgespec.errors import BatchError, CapabilityError, StateError
from edgespec.formats.onnx.tiles import STATES
from edgespec.kernels.interface import NO_FLOOR, KernelStates, StateSizes, states_bytes
from edgespec.types import Batch, Logits
from edgespec.vocabulary import Vocabulary

LOG = 32  # rows of a pass that a text can drop


class HybridEngine(KernelEngine):
    """As `KernelEngine`; a text drops any of its last pass's rows, up to LOG, or returns to a checkpoint or to 0."""

    def __init__(
        self,
        source: Source,
        graph: Graph,
        settings: OnnxSettings,
        config: ModelConfig,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        super().__init__(source, graph, settings, config, vocabulary)
        self._states = KernelStates(graph.states, settings.max_sequences, LOG)
        self._named[STATES] = np.array([self._states.number])
        self._checkpoints = Checkpoints()
        self.facts = replace(self.facts, can_rollback=False, rollback_rows=LOG - 1, has_checkpoints=True)

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        for part in placed.values():
            if part.is_tree and len(part.rows) > LOG:
                raise BatchError(f"a tree of {len(part.rows)} rows was given, a {self.facts.architecture} takes {LOG}")
        before: dict[int, NDArray[np.uint8]] = {}
        for sequence, part in placed.items():
            if part.base + len(part.rows) - self._states.floors[sequence] > LOG:
                self._keep_floor(sequence)
            if part.base and len(part.rows) > LOG:  # its first rows are added at once
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

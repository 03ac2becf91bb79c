"""The KV caches of an ONNX engine, one for each sequence.

A sequence's bits depend on its own tokens alone, and what others hold does not slow it down. Sequences with a single
row each go through the model together, all others in passes of their own. In reproducible mode passes are padded into
the width class, and none goes across the edge of attention (`settings.EDGE`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.onnx.passes import Passes, PassRows, SharedPasses
from edgespec.engines.rows import SequenceRows
from edgespec.types import Batch, Logits, TokenIds


def end_of_pass(base: int, end: int, edge: int) -> int:
    """Where a pass over the cells from `base` to `end` has to end: at the edge if that lies between them."""
    return edge if base < edge < end else end


def rows_before(base: int, missing: int, edge: int) -> int:
    """How many of `missing` rows can be the ones before cell `base`: all or none."""
    return missing if missing <= base and not base - missing < edge <= base else 0


class Caches:
    """One cache per sequence, chains only. Narrower passes are padded to `least_rows` rows, none goes across `edge`.

    `has_batches`: whether single rows of several sequences share a pass.
    """

    def __init__(self, passes: Passes, max_sequences: int, edge: int = 0) -> None:
        self._passes, self._edge = passes, edge
        self._batches = passes if isinstance(passes, SharedPasses) and passes.has_batches else None
        self._ends = [0] * max_sequences  # of what a sequence's cache holds
        self.least_rows = 1
        self._ids = np.zeros((max_sequences, passes.capacity), np.int32)
        self._gathered = np.zeros((0, passes.logits.shape[1]), np.float32)
        self._shift = 0
        self._states: NDArray[np.float32] | None = None  # of the last batch, if several passes gave them

    def run(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        """Score a checked batch of chains, which are in the caches afterwards; logits of the wanted rows in order."""
        self._states = None
        if len(placed) == 1:
            ((sequence, part),) = placed.items()
            return self._run(sequence, part, batch.outputs)
        states = np.zeros((batch.width, self._passes.hidden_size), np.float32) if self._passes.hidden_size else None
        count = int(np.count_nonzero(batch.outputs))
        if len(self._gathered) < count:
            self._gathered = np.zeros((count, self._gathered.shape[1]), np.float32)
        place = np.cumsum(batch.outputs) - 1
        singles = self._singles(placed)
        if singles:
            logits = self._run_singles(singles)
            for sequence, part in singles.items():
                row, found = part.rows[0], sequence - min(singles)
                if batch.outputs[row]:
                    self._gathered[place[row]] = logits[found]
                if states is not None:
                    states[row] = self._passes.hidden()[found]
        for sequence, part in placed.items():
            if sequence in singles:
                continue
            wanted = batch.outputs[part.rows]
            if not wanted.any():  # the rows are needed in the cache all the same
                self._run(sequence, part, np.arange(wanted.size) == wanted.size - 1)
            else:
                self._gathered[place[np.array(part.rows)[wanted]]] = self._run(sequence, part, wanted)
            if states is not None:
                states[part.rows] = self.hidden(len(part.rows))
        self._states = states
        return self._gathered[:count]

    @property
    def has_batches(self) -> bool:
        """A lone row that is padded to more has other bits than in a batch, where attention sees one of them."""
        return self._batches is not None and self.least_rows == 1

    def never_batch(self) -> None:
        """Give each sequence a pass of its own from now on."""
        self._batches = None

    def _singles(self, placed: dict[int, SequenceRows]) -> dict[int, SequenceRows]:
        """Those that can share a pass: the operator wants one row of each, behind at least one cell."""
        if not self.has_batches:
            return {}
        found = {sequence: part for sequence, part in placed.items() if len(part.rows) == 1 and part.base}
        if len(found) < 2:
            return {}
        between = set(range(min(found), max(found))) - found.keys()
        return {} if any(self._ends[sequence] == self._passes.capacity for sequence in between) else found

    def _run_singles(self, singles: dict[int, SequenceRows]) -> Logits:
        """Logits of the caches from the first of `singles` to the last one.

        Caches in between that have no row get one all the same, in the cell behind their text, which is overwritten
        before it is read.
        """
        assert self._batches is not None
        first, last = min(singles), max(singles)
        bases, ids = np.array(self._ends[first : last + 1], np.int32), np.zeros(last + 1 - first, np.int32)
        for sequence, part in singles.items():
            bases[sequence - first], ids[sequence - first] = part.base, part.token_ids[0]
        logits = self._batches.run_each(first, ids, bases)
        for sequence, part in singles.items():
            self._ids[sequence, part.base] = part.token_ids[0]
            self._ends[sequence] = part.base + 1
        return logits

    def _run(self, sequence: int, part: SequenceRows, wanted: NDArray[np.bool_]) -> Logits:
        """The logits of a chain's wanted rows, in one pass, or in two if one would go across the edge."""
        count = end_of_pass(part.base, part.base + len(part.rows), self._edge) - part.base
        if count == len(part.rows):
            return self._run_pass(sequence, part, wanted)
        logits, states = [], []
        for piece, marked in ((part.first(count), wanted[:count]), (part.behind(count), wanted[count:])):
            rows = marked if marked.any() else np.arange(marked.size) == marked.size - 1
            logits.append(self._run_pass(sequence, piece, rows)[: np.count_nonzero(marked)].copy())
            if self._passes.hidden_size:
                states.append(self.hidden(len(piece.rows)).copy())
        self._states = np.concatenate(states) if states else None
        return np.concatenate(logits)

    def _run_pass(self, sequence: int, part: SequenceRows, wanted: NDArray[np.bool_]) -> Logits:
        """One pass over a chain, with at least `least_rows` rows, with and without logits.

        Tokens before the chain are scored again, with the same bits, so that no cell after it is needed. Where there
        are too few, at the start of a text and behind the edge, scratch rows follow instead.
        """
        self._states = None
        missing = max(self.least_rows - len(part.rows), 0)
        shift = self._shift = rows_before(part.base, missing, self._edge)
        ids = part.token_ids
        if missing:
            before = self._ids[sequence, part.base - shift : part.base]
            ids = np.concatenate((before, ids, np.zeros(missing - shift, np.int32)))
        outputs = np.flatnonzero(wanted) + shift
        count = outputs.size
        if count < self.least_rows:
            outputs = np.concatenate((outputs, np.repeat(outputs[-1:], self.least_rows - count)))
        logits = self._passes.run(sequence, PassRows(part.base - shift, ids, outputs))
        end = self._ends[sequence] = part.base + len(part.rows)
        self._ids[sequence, part.base : end] = part.token_ids
        return logits[:count]

    def token_ids(self, sequence: int) -> TokenIds:
        """The tokens that the cells of a sequence were last filled with [capacity], a view."""
        found: TokenIds = self._ids[sequence]
        return found

    def truncate(self, sequence: int, to_length: int) -> None:
        """Cells beyond a sequence's length are overwritten before they are read."""
        self._ends[sequence] = to_length

    def fork(self, source: int, destination: int, length: int) -> None:
        self._passes.copy(source, destination, length)
        self._ids[destination] = self._ids[source]
        self._ends[destination] = length

    def save(self, sequence: int, length: int) -> bytes:
        return self._ids[sequence, :length].tobytes() + self._passes.read(sequence, length)

    def load(self, sequence: int, payload: bytes | memoryview, length: int) -> None:
        self._ids[sequence, :length] = np.frombuffer(payload, np.int32, length)
        self._passes.write(sequence, payload[4 * length :])
        self._ends[sequence] = length

    def hidden(self, width: int) -> NDArray[np.float32]:
        """Last hidden states [width, hidden size] of the last batch's rows; a view that the next one overwrites."""
        if self._states is not None:
            return self._states
        return self._passes.hidden()[self._shift : self._shift + width]

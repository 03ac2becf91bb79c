"""One cache for all sequences: rows of several sequences and of trees go through the model in one pass.

New rows always go after all others, and a bias lets each row attend to its own ancestors only. A token's cell is
therefore not its position, a fork copies no cells, and accepting a branch only records which cells it has. Cells that
are no longer used are freed when the end of the cache is reached.

Cell 0 is never used (`FIRST`): on an empty cache the attention operator would count positions by itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.onnx.caches import Caches
from edgespec.engines.onnx.passes import PassRows, SharedPasses
from edgespec.engines.onnx.settings import FIRST
from edgespec.engines.rows import SequenceRows
from edgespec.types import Batch, Logits

NO_CELLS = np.zeros(0, np.intp)


class PackedCaches(Caches):
    """Bits depend on what else is in the cache, so this is not for reproducible mode."""

    can_tree = True

    def __init__(self, passes: SharedPasses, max_sequences: int) -> None:
        self._passes = passes
        self._cells = [NO_CELLS] * max_sequences  # the cells of each sequence in the order of its tokens, ascending
        self._waiting: dict[int, NDArray[np.intp]] = {}  # cells of a sequence's unsettled tree, by row
        self._end = FIRST
        self._all = np.arange(passes.capacity)

    def run(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        self._make_room(batch.width)
        if len(placed) == 1:
            ((sequence, part),) = placed.items()
            # Every cell up to the end is its own, so they lie in the order of its tokens.
            if not part.is_tree and self._end == FIRST + self._cells[sequence].size:
                return self._run_chain(sequence, batch)
        positions = np.zeros(batch.width, np.int32)
        sees = [NO_CELLS] * batch.width
        for sequence, part in placed.items():
            positions[part.rows] = part.positions()
            for row in part.rows:
                sees[row] = self._cells[sequence]
        outputs = np.flatnonzero(batch.outputs)
        rows = PassRows(self._end, batch.token_ids, outputs, batch.parents.tolist(), positions, sees)
        logits = self._passes.run(0, rows)
        for sequence, part in placed.items():
            new = self._end + np.array(part.rows, np.intp)
            if part.is_tree:
                self._waiting[sequence] = new
            else:
                self._cells[sequence] = np.concatenate((self._cells[sequence], new))
        self._end += batch.width
        return logits

    def _run_chain(self, sequence: int, batch: Batch) -> Logits:
        """The usual pass, quicker: the processor's caches hold little of this code when a pass over weights ends."""
        rows = PassRows(self._end, batch.token_ids, np.flatnonzero(batch.outputs), skipped=FIRST)
        logits = self._passes.run(0, rows)
        self._end += batch.width
        self._cells[sequence] = self._all[FIRST : self._end]
        return logits

    def keep(self, sequence: int, part: SequenceRows, path: list[int]) -> None:
        if part.is_tree:
            kept = self._waiting.pop(sequence)[path]
            self._cells[sequence] = np.concatenate((self._cells[sequence], kept))
            self._find_end()
        else:
            self.truncate(sequence, part.base + len(path))

    def truncate(self, sequence: int, to_length: int) -> None:
        self._waiting.pop(sequence, None)
        self._cells[sequence] = self._cells[sequence][:to_length]
        self._find_end()

    def fork(self, source: int, destination: int, length: int) -> None:
        self._waiting.pop(destination, None)
        self._cells[destination] = self._cells[source][:length]

    def save(self, sequence: int, length: int) -> bytes:
        return self._passes.read(0, self._cells[sequence][:length])

    def load(self, sequence: int, payload: bytes | memoryview, length: int) -> None:
        self.truncate(sequence, 0)
        self._make_room(length)
        cells = np.arange(self._end, self._end + length)
        self._passes.write(0, cells, payload)
        self._cells[sequence] = cells
        self._end += length

    def hidden(self, width: int) -> NDArray[np.float32]:
        return self._passes.hidden()[:width]

    def _find_end(self) -> None:
        owned = (*self._cells, *self._waiting.values())
        self._end = max((int(cells[-1]) + 1 for cells in owned if cells.size), default=FIRST)

    def _make_room(self, count: int) -> None:
        """Move all used cells to the front when `count` new ones do not fit after them."""
        if self._end + count <= self._passes.capacity:
            return
        owned = np.sort(np.concatenate((*self._cells, *self._waiting.values())))
        owned = owned[np.flatnonzero(np.diff(owned, prepend=-1))]  # each once; np.unique would import numpy.ma, 65 ms
        self._passes.move(0, owned, slice(FIRST, FIRST + owned.size))
        self._cells = [FIRST + np.searchsorted(owned, cells) for cells in self._cells]
        self._waiting = {s: FIRST + np.searchsorted(owned, cells) for s, cells in self._waiting.items()}
        self._end = FIRST + owned.size

"""The rows of a batch, the lengths of all sequences, and the base class of engines that keep both in a book.
What every engine checks first and notes last stands here, in one place.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine, EngineFacts
from edgespec.engines.model_files import StateStamp
from edgespec.engines.model_use import MOST_CHECKPOINTS
from edgespec.errors import BatchError, Cancelled, ContextFull, EngineError
from edgespec.types import NO_PARENT, Batch, Logits, TokenIds


@dataclass(slots=True)
class SequenceRows:
    """`base`: tokens cached before; `start`: the first row in the batch; `parents`: counted from that one, or -1."""

    base: int
    start: int
    parents: list[int]
    token_ids: TokenIds
    is_tree: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_tree = self.parents != list(range(-1, self.count - 1))

    @property
    def count(self) -> int:
        return len(self.parents)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.count)

    def path(self, rows: tuple[int, ...]) -> list[int] | None:
        """Batch rows counted from `start`, or None when they are not a path from a root."""
        local = [row - self.start for row in rows]
        follows = all(
            0 <= row < self.count and self.parents[row] == parent
            for row, parent in zip(local, (NO_PARENT, *local), strict=False)
        )
        return local if follows else None

    def positions(self) -> list[int]:
        """Position of each row in its text: one after its parent."""
        found: list[int] = []
        for parent in self.parents:
            found.append(self.base if parent == NO_PARENT else found[parent] + 1)
        return found


class SequenceBook:
    """The length of every sequence, and the rows of the last batch that `keep_path` may choose from."""

    def __init__(self, max_sequences: int) -> None:
        self.lengths = [0] * max_sequences
        self._last: dict[int, SequenceRows] = {}

    def check(self, sequence: int) -> None:
        """Raises BatchError for a sequence that does not exist."""
        if not 0 <= sequence < len(self.lengths):
            raise BatchError(f"sequence {sequence} does not exist, this engine has 0..{len(self.lengths) - 1}")

    def check_settled(self, sequence: int) -> None:
        """Raises BatchError for a sequence that does not exist or that needs a `keep_path` first."""
        self.check(sequence)
        if self.is_unsettled(sequence):
            raise BatchError(f"sequence {sequence} holds an unsettled tree; call keep_path or rollback first")

    def is_unsettled(self, sequence: int) -> bool:
        """Whether it was last given a tree, of which nothing was chosen yet."""
        return sequence in self._last and self._last[sequence].is_tree

    def record(self, placed: dict[int, SequenceRows]) -> None:
        """A pass has scored these rows: chains are in the cache now, trees need a `keep_path`."""
        for sequence, part in placed.items():
            if not part.is_tree:
                self.lengths[sequence] += part.count
        waiting = {sequence: part for sequence, part in self._last.items() if part.is_tree}
        self._last = {**waiting, **placed}

    def droppable(self, sequence: int) -> int:
        """Rows of the last batch behind its first one, which nothing was dropped from yet."""
        part = self._last.get(sequence)
        return part.count - 1 if part is not None else 0

    def chosen(self, rows: tuple[int, ...], sequence: int) -> tuple[SequenceRows, list[int]]:
        """What the last batch added to a sequence, and `rows` as a path through it. Raises BatchError."""
        self.check(sequence)
        part = self._last.get(sequence)
        path = part.path(rows) if part else None
        if part is None or path is None:
            raise BatchError(f"rows {rows} are not a path through what the last batch added to sequence {sequence}")
        return part, path

    def check_rollback(self, to_length: int, sequence: int) -> None:
        """Raises BatchError for a length that the sequence does not have."""
        self.check(sequence)
        if not 0 <= to_length <= self.lengths[sequence]:
            raise BatchError(
                f"sequence {sequence} can roll back to 0..{self.lengths[sequence]} tokens, not to {to_length}"
            )

    def forget_last(self, sequence: int) -> bool:
        """Drop the last batch of a sequence; whether it was a tree that still needed a `keep_path`."""
        part = self._last.pop(sequence, None)
        return part is not None and part.is_tree

    def settle(self, sequence: int, length: int) -> None:
        """The sequence holds `length` tokens now; drop its last batch."""
        self.forget_last(sequence)
        self.lengths[sequence] = length


class Checkpoints:
    """Copies of the running states of sequences, at the latest lengths that were chosen: a text can return to these."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, NDArray[np.uint8]]] = {}  # by sequence, then by length

    def add(self, length: int, sequence: int, read: Callable[[], NDArray[np.uint8]]) -> None:
        """Keep what `read` gives of a sequence as it was after `length` tokens."""
        kept = self._kept.setdefault(sequence, {})
        while len(kept) >= MOST_CHECKPOINTS and length not in kept:
            del kept[min(kept)]
        kept[length] = read()

    def at(self, length: int, sequence: int) -> NDArray[np.uint8] | None:
        return self._kept.get(sequence, {}).get(length)

    def latest(self, length: int, sequence: int) -> int:
        """The longest length up to `length` that there is one of; 0 without."""
        return max((each for each in self._kept.get(sequence, {}) if each <= length), default=0)

    def shorten(self, length: int, sequence: int) -> None:
        """The sequence holds `length` tokens now."""
        kept = self._kept.get(sequence, {})
        self._kept[sequence] = {each: state for each, state in kept.items() if each <= length}

    def fork(self, source: int, destination: int) -> None:
        self._kept[destination] = dict(self._kept.get(source, {}))


def placed_rows(
    batch: Batch, facts: EngineFacts, vocabulary_size: int, lengths: Sequence[int]
) -> dict[int, SequenceRows]:
    """A batch as one `SequenceRows` per sequence, in order of first appearance; `lengths` of the sequences now.

    Raises BatchError or ContextFull for what no engine accepts.
    """
    width = batch.width
    if width == 0:
        raise BatchError("a batch needs at least one row")
    if width > facts.max_batch:
        raise BatchError(f"a batch of {width} rows was given, this engine takes at most {facts.max_batch}")
    if not (batch.parents.size == batch.sequences.size == batch.outputs.size == width):
        raise BatchError("a batch needs one parent, sequence and output flag per row")
    ids, parents, sequences = batch.token_ids.tolist(), batch.parents.tolist(), batch.sequences.tolist()
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocabulary_size:
        raise BatchError(f"token id {low if low < 0 else high} is outside the vocabulary 0..{vocabulary_size - 1}")
    if True not in batch.outputs.tolist():
        raise BatchError("a batch needs at least one row with logits")
    placed: dict[int, SequenceRows] = {}
    start = 0
    while start < width:
        sequence, stop = sequences[start], start + sequences.count(sequences[start])
        if not 0 <= sequence < facts.max_sequences:
            raise BatchError(f"row {start} names sequence {sequence}, this engine has 0..{facts.max_sequences - 1}")
        if sequences[start:stop] != [sequence] * (stop - start):
            raise BatchError(f"the rows of sequence {sequence} are not next to each other")
        for row in range(start, stop):
            if parents[row] >= row or parents[row] < NO_PARENT:
                raise BatchError(f"row {row} follows row {parents[row]}, which does not come before it")
            if NO_PARENT < parents[row] < start:
                raise BatchError(f"row {row} of sequence {sequence} follows a row of another sequence")
        if lengths[sequence] + stop - start > facts.context_length:
            raise ContextFull(
                f"sequence {sequence} holds {lengths[sequence]} tokens; {stop - start} more do not fit the context of "
                f"{facts.context_length}. Give a larger --ctx-size or a shorter prompt"
            )
        local = [max(parent - start, NO_PARENT) for parent in parents[start:stop]]
        placed[sequence] = SequenceRows(lengths[sequence], start, local, batch.token_ids[start:stop])
        start = stop
    return placed


def check_text(token_ids: TokenIds, most: int, vocabulary_size: int) -> None:
    """Raises BatchError for a text to embed that is empty, of over `most` tokens, or of unknown ones."""
    if not 1 <= len(token_ids) <= most:
        raise BatchError(f"a text of {len(token_ids)} tokens was given; one of 1 to {most} can be embedded")
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocabulary_size:
        raise BatchError(f"token id {low if low < 0 else high} is outside the vocabulary 0..{vocabulary_size - 1}")


def fault_of(logits: Logits) -> str:
    """What is wrong with the logits [rows, vocabulary] of a few different tokens; empty when nothing is.

    Weights that are all zero load without an error and give every token the same score.
    """
    if not np.isfinite(logits).all():
        return "its logits are not numbers"
    if logits.shape[1] > 1 and (logits.max(axis=1) == logits.min(axis=1)).any():
        return "it gives every token the same score, as weights that are all zero do"
    return ""


class BookedEngine(Engine):
    """Keeps the book and whether it is open; the abstract methods get checked arguments.

    `_max_outputs`: most rows with logits of a pass. The book is changed once an abstract method has returned: one that
    fails leaves it as it was, unless it empties the sequence itself.
    """

    _book: SequenceBook
    _stamp: StateStamp
    _max_outputs = sys.maxsize
    _is_open = True
    # What ends passes: `is_set`, `set` and `clear`. No threading.Event, whose lock an interrupt may leave held.
    _cancel: Any

    @property
    def most_draft_tokens(self) -> int:
        return min(super().most_draft_tokens, self._max_outputs - 1)

    def forward(self, batch: Batch) -> Logits:
        self._require_open()
        placed = placed_rows(batch, self.facts, self.vocabulary.size, self._book.lengths)
        if batch.width > self._max_outputs < np.count_nonzero(batch.outputs):
            raise BatchError(f"a batch may ask for at most {self._max_outputs} rows of logits; split it")
        for sequence in placed:
            self._book.check_settled(sequence)
        if self._cancel.is_set():
            self._cancel.clear()
            raise Cancelled("the pass was cancelled before it began; the cache is as before")
        logits = self._score(batch, placed)
        self._book.record(placed)
        return logits

    @abstractmethod
    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        """The pass of `forward`; `placed`: the rows of each sequence."""

    def length(self, sequence: int = 0) -> int:
        self._require_open()
        self._book.check(sequence)
        return self._book.lengths[sequence]

    def rollback(self, to_length: int, sequence: int = 0) -> None:
        self._require_open()
        self._book.check_rollback(to_length, sequence)
        self._truncate(to_length, sequence)
        self._book.settle(sequence, to_length)

    def _truncate(self, to_length: int, sequence: int) -> None:
        """Drop all tokens from position `to_length` on, and an unsettled tree, where they are not just written over."""

    def keep_path(self, rows: tuple[int, ...], sequence: int = 0) -> None:
        self._require_open()
        part, path = self._book.chosen(rows, sequence)
        self._keep(part, path, sequence)
        self._book.settle(sequence, part.base + len(path))

    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        """Keep the rows of `path` of `part`, the last rows of a sequence, and drop the others, where it is no chain."""

    def fork(self, source: int, destination: int) -> None:
        self._require_open()
        self._book.check_settled(source)
        self._book.check(destination)
        if source != destination:
            self._copy(source, destination)
            self._book.settle(destination, self._book.lengths[source])

    @abstractmethod
    def _copy(self, source: int, destination: int) -> None:
        """Make another sequence hold what `source` holds."""

    def save_state(self, sequence: int = 0) -> bytes:
        self._require_open()
        self._book.check_settled(sequence)
        return self._stamp.wrap(self._state(sequence), self._book.lengths[sequence])

    @abstractmethod
    def _state(self, sequence: int) -> bytes | memoryview:
        """All that `_restore` needs of a sequence."""

    def load_state(self, state: bytes | memoryview, sequence: int = 0) -> None:
        self._require_open()
        self._book.check(sequence)
        payload, length = self._stamp.unwrap(state, self.facts.context_length)
        self._restore(payload, length, sequence)
        self._book.settle(sequence, length)

    @abstractmethod
    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        """Give a sequence what `_state` gave of one of `length` tokens."""

    def cancel(self) -> None:
        self._require_open()
        self._cancel.set()

    def clear_cancel(self) -> None:
        self._require_open()
        self._cancel.clear()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._free()

    @abstractmethod
    def _free(self) -> None:
        """Free everything."""

    def _require_open(self) -> None:
        if not self._is_open:
            raise EngineError("this engine is closed; load the model again")

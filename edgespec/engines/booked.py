"""Base class of engines that keep a `SequenceBook`: what each call checks first and notes last, in one place."""

from __future__ import annotations

import sys
from abc import abstractmethod

import numpy as np

from edgespec.engines.base import Engine
from edgespec.engines.model_files import StateStamp
from edgespec.engines.rows import SequenceBook, SequenceRows, check_batch, split_by_sequence
from edgespec.errors import BatchError, Cancelled, EngineError
from edgespec.types import Batch, Logits


class BookedEngine(Engine):
    """Keeps the book, the cancel flag and whether it is open; the abstract methods get checked arguments.

    `_max_outputs`: most rows with logits of a pass. The book is changed once an abstract method has returned: one that
    fails leaves it as it was, unless it empties the sequence itself.
    """

    _book: SequenceBook
    _stamp: StateStamp
    _max_outputs = sys.maxsize
    _is_open = True
    _is_cancelled = False

    def forward(self, batch: Batch) -> Logits:
        self._require_open()
        check_batch(batch, self.facts, self.vocabulary.size, self._book.lengths)
        if np.count_nonzero(batch.outputs) > self._max_outputs:
            raise BatchError(f"a batch may ask for at most {self._max_outputs} rows of logits; split it")
        placed = split_by_sequence(batch, self._book.lengths)
        for sequence in placed:
            self._book.check_settled(sequence)
        if self._is_cancelled:
            self._is_cancelled = False
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

    @abstractmethod
    def _truncate(self, to_length: int, sequence: int) -> None:
        """Drop all tokens from position `to_length` on, and an unsettled tree."""

    def keep_path(self, rows: tuple[int, ...], sequence: int = 0) -> None:
        self._require_open()
        part, path = self._book.chosen(rows, sequence)
        self._keep(part, path, sequence)
        self._book.settle(sequence, part.base + len(path))

    @abstractmethod
    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        """Keep the rows of `path` of `part`, the last rows of a sequence, and drop the others."""

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
        self._is_cancelled = True

    def clear_cancel(self) -> None:
        self._require_open()
        self._is_cancelled = False

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

"""The texts that an engine has cached: how they are shortened, returned to, copied and kept.

A cache of keys and values is shortened by dropping cells. A running state (`running_state`) is not: it can drop the
last rows of a pass where the library has snapshots of it, and return to copies of it at lengths that a caller chose. A
draft model returns to the text that is certain with one, and a conversation to the end of its last question. Layers
with a sliding window keep all their cells, but llama.cpp saves only those in the window: a text that was loaded can be
continued, not shortened.
"""

from __future__ import annotations

from edgespec.engines.base import EngineFacts
from edgespec.engines.checkpoints import Checkpoints
from edgespec.engines.llamacpp.cells import Cells
from edgespec.engines.rows import SequenceBook
from edgespec.errors import CapabilityError


class CachedTexts:
    """The texts of an engine's sequences: their lengths in `book`, their cells in `cells`, and checkpoints of them."""

    def __init__(self, cells: Cells, book: SequenceBook) -> None:
        self._cells, self._book = cells, book
        self._checkpoints = Checkpoints()
        self._least: dict[int, int] = {}  # by sequence, the length below which a loaded text lacks cells

    def rollback(self, to_length: int, sequence: int, facts: EngineFacts) -> None:
        """Shorten a sequence to a length that it has. Raises CapabilityError as `Engine.rollback`."""
        length = self._book.lengths[sequence]
        if 0 < to_length < (least := self._least.get(sequence, 0)):
            raise CapabilityError(
                f"a saved state of a {facts.architecture} model holds the last {facts.state_window} tokens of layers "
                f"with a sliding window; this one, loaded with {least} tokens, cannot be rolled back to {to_length}: "
                "roll back to 0"
            )
        droppable = self._droppable(sequence, facts)
        was_tree = self._book.forget_last(sequence)
        self._checkpoints.shorten(to_length, sequence)
        if to_length == 0:
            self._least.pop(sequence, None)
            if length or was_tree or not facts.can_rollback:
                self._cells.forget(sequence)
        elif to_length == length and not was_tree:
            if not facts.can_rollback:  # report now that an aborted pass cannot be undone; else the next one trims
                self._cells.trim(sequence)
        elif facts.can_rollback or length - to_length <= droppable:
            self._cells.drop_from(to_length, sequence)
        else:
            self._return_to(to_length, sequence, facts)

    def _return_to(self, to_length: int, sequence: int, facts: EngineFacts) -> None:
        state = self._checkpoints.at(to_length, sequence)
        if state is None:
            raise CapabilityError(
                f"{facts.architecture} models keep a running state that cannot be rolled back to {to_length} of "
                f"{self._book.lengths[sequence]} tokens; use --drafter none"
            )
        self._cells.return_to(state, to_length, sequence)

    def _droppable(self, sequence: int, facts: EngineFacts) -> int:
        """Rows of the last pass that a model with a running state can drop."""
        return min(self._book.droppable(sequence), facts.rollback_rows)

    def checkpoint(self, sequence: int) -> None:
        """Copy the running state of a sequence that holds tokens."""
        self._checkpoints.add(self._book.lengths[sequence], sequence, lambda: self._cells.running_state(sequence))

    def reachable(self, to_length: int, sequence: int, facts: EngineFacts) -> int:
        """The longest length up to `to_length` that `rollback` can shorten a sequence to."""
        if to_length < self._least.get(sequence, 0):
            return 0
        dropped = self._book.lengths[sequence] - to_length
        if facts.can_rollback or 0 <= dropped <= self._droppable(sequence, facts):
            return to_length
        return self._checkpoints.latest(to_length, sequence)

    def fork(self, source: int, destination: int) -> None:
        """Let `destination` hold what `source`, another sequence, holds."""
        self._book.forget_last(destination)
        self._cells.fork(source, destination)
        self._checkpoints.fork(source, destination)
        self._least[destination] = self._least.get(source, 0)

    def load(self, state: bytes | memoryview, length: int, sequence: int, facts: EngineFacts) -> None:
        """Give a sequence the `state` of one of `length` tokens. Raises StateError as `Cells.load`."""
        self._book.forget_last(sequence)
        self._checkpoints.shorten(0, sequence)
        self._least.pop(sequence, None)
        self._cells.load(state, length, sequence)
        self._least[sequence] = facts.loaded_reach(length)

"""Assigns cells of the KV cache to sequences: the only module that adds and removes llama.cpp sequence ids.

Ids: first our own sequences, then a pool of branch ids for trees, which there are none of where sequences have streams
of their own. While a tree is unsettled its branch ids share the cells of its sequence; what changes that sequence
drops them first, so that no cell remains of a token that was dropped.

A pass can fail, be cancelled, or be interrupted by Ctrl-C between any two calls. Therefore `lengths` decreases before
cells are removed and increases after they are added: the library may hold more than `lengths` says, never less, and
every method that reads or extends a sequence trims it first. Padding rows, which lie behind a sequence, are removed in
the same way.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.booked import SequenceBook, SequenceRows
from edgespec.engines.llamacpp.library import END, complaints, forget_complaints, library
from edgespec.engines.llamacpp.rows import Branches, branches_through, leaves
from edgespec.engines.llamacpp.settings import ContextSettings
from edgespec.errors import BatchError, CapabilityError, EngineError, StateError

RUNNING_STATE_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class Cells:
    """Keeps the library's cells consistent with the lengths in `book`."""

    def __init__(self, context: Any, settings: ContextSettings, book: SequenceBook) -> None:
        llama = library()
        self._context = context
        self._memory = llama.llama_get_memory(context)
        self._remove, self._copy = llama.llama_memory_seq_rm, llama.llama_memory_seq_cp
        self._last_position = llama.llama_memory_seq_pos_max
        self._branch_ids = range(settings.max_sequences, settings.sequence_ids)
        self._has_streams, self._keeps_state = settings.streams, settings.keeps_state
        self._book, self._lengths = book, book.lengths
        self._branches: Branches = {}  # of unsettled trees

    def prepare(self, placed: dict[int, SequenceRows]) -> Branches:
        """Prepare the cache for a batch, and give every branch of its trees an id; the main chain keeps the sequence's.

        Raises BatchError when there are too few ids, CapabilityError when there are none, before anything is changed.
        """
        trees = {sequence: part for sequence, part in placed.items() if part.is_tree}
        needed = {sequence: len(leaves(part.parents)) - 1 for sequence, part in trees.items()}
        if trees and not self._branch_ids:
            raise CapabilityError(
                "this model was loaded for chains only: trees need a cache that rolls back, and reproducible=False"
            )
        for sequence in [each for each in self._branches if not self._book.is_unsettled(each)]:
            self._drop_branches(sequence)  # of a pass that failed
        held = {branch for rows in self._branches.values() for row in rows for branch in row}
        free = [branch for branch in self._branch_ids if branch not in held]
        if sum(needed.values()) > len(free):
            raise BatchError(
                f"the trees of this batch have {sum(needed.values())} side branches, this engine has room for "
                f"{len(free)}; draft fewer branches or load with a larger max_branches"
            )
        for sequence in placed:
            self.trim(sequence)
        for sequence, part in trees.items():
            chosen, free = free[: needed[sequence]], free[needed[sequence] :]
            self._branches[sequence] = branches_through(part.parents, [sequence, *chosen])
            for branch in chosen:
                self._copy(self._memory, sequence, branch, -1, END)
        return {sequence: self._branches[sequence] for sequence in trees}

    def _drop_branches(self, sequence: int) -> None:
        for branch in {branch for row in self._branches.get(sequence, ()) for branch in row} - {sequence}:
            self._remove(self._memory, branch, -1, END)
        self._branches.pop(sequence, None)

    def trim(self, sequence: int) -> None:
        """Remove what an unfinished pass added to a sequence."""
        length = self._lengths[sequence]
        if self._last_position(self._memory, sequence) < length:
            return
        if not self._remove(self._memory, sequence, length, END):
            raise EngineError("an unfinished pass left a state that this model cannot roll back; roll back to 0 first")

    def drop_from(self, position: int, sequence: int) -> None:
        """Remove a sequence's tokens from `position` on. Raises CapabilityError when the library refuses."""
        self._lengths[sequence] = position
        self._drop_branches(sequence)
        if not self._remove(self._memory, sequence, position, END):
            raise CapabilityError(f"llama.cpp cannot roll this cache back to {position} tokens; use --drafter none")

    def keep_branch(self, path: list[int], part: SequenceRows, sequence: int) -> None:
        """Keep the rows of `path` and remove the rest of the tree."""
        kept = part.base + len(path)
        winner = self._branches[sequence][path[-1]][0] if path else sequence
        if winner == sequence:
            self._remove(self._memory, sequence, kept, END)
        else:
            self._remove(self._memory, sequence, part.base, END)
            self._copy(self._memory, winner, sequence, part.base, kept)
        self._drop_branches(sequence)
        self._lengths[sequence] = kept

    def forget(self, sequence: int) -> None:
        """Empty a sequence, which unlike a rollback always works."""
        self._lengths[sequence] = 0
        self._drop_branches(sequence)
        self._remove(self._memory, sequence, -1, END)

    def fork(self, source: int, destination: int) -> None:
        """Let `destination` share all cells of `source`; nothing is copied until they differ.

        Sequences with streams of their own cannot share: `destination` gets a copy. Of a running state llama.cpp would
        copy the latest, although the last rows were dropped: it goes through a saved one. Raises EngineError.
        """
        if self._keeps_state:
            self.load(self.state(source).data, self._lengths[source], destination)
            return
        self.trim(source)
        self.forget(destination)
        self._copy(self._memory, source, destination, -1, END)
        self._lengths[destination] = self._lengths[source]
        if self._has_streams:
            self._make_copies()

    def _make_copies(self) -> None:
        """llama.cpp makes copies in the next pass: this one is over a row of the first sequence, and removed again.

        A state that is saved before would be another text's, and one that is loaded would be overwritten or copied.
        """
        llama = library()
        token = (llama.llama_token * 1)(0)  # `row` points to it
        row = llama.llama_batch_get_one(token, 1)
        row.logits = (ctypes.c_int8 * 1)(0)  # those of the last pass may still be wanted
        forget_complaints()
        result = llama.llama_decode(self._context, row)  # copies come first: a lack of room or a cancel does no harm
        self.trim(0)
        if result < 0:
            raise EngineError(f"llama.cpp failed on a copy of a sequence (result {result}): {complaints()}")

    def state(self, sequence: int, flags: int = 0) -> NDArray[np.uint8]:
        """A sequence's state; with RUNNING_STATE_ONLY without its keys and values."""
        self.trim(sequence)
        size = int(library().llama_state_seq_get_size_ext(self._context, sequence, flags))
        state = np.empty(size, np.uint8)
        forget_complaints()
        written = library().llama_state_seq_get_data_ext(self._context, _address(state), size, sequence, flags)
        if written != size:
            raise EngineError(f"llama.cpp wrote {written} of {size} bytes of the state: {complaints()}")
        return state

    def return_to(self, state: NDArray[np.uint8], length: int, sequence: int) -> None:
        """Shorten a sequence to `length` tokens, after which it had the running state `state`.

        Raises EngineError, and the sequence is then empty.
        """
        self._lengths[sequence] = length
        forget_complaints()
        restored = library().llama_state_seq_set_data_ext(
            self._context, _address(state), state.size, sequence, RUNNING_STATE_ONLY
        )
        if not restored or not self._remove(self._memory, sequence, length, END):
            self.forget(sequence)
            raise EngineError(f"llama.cpp refused the state, the sequence is now empty: {complaints()}")

    def load(self, state: bytes | memoryview, length: int, sequence: int) -> None:
        """Give a sequence the `state` of one of `length` tokens. Raises StateError, and the sequence is then empty."""
        self.forget(sequence)
        if not length:
            return
        forget_complaints()
        buffer = np.frombuffer(state, np.uint8)
        if not library().llama_state_seq_set_data(self._context, _address(buffer), len(state), sequence):
            self.forget(sequence)
            raise StateError(f"llama.cpp refused the state, the sequence is now empty: {complaints()}")
        self._lengths[sequence] = length


def _address(state: NDArray[np.uint8]) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))

"""Hidden states of the last pass: the input of the model's head at each row."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import StatesOf
from edgespec.engines.llamacpp.extensions import extension
from edgespec.engines.llamacpp.library import library
from edgespec.engines.llamacpp.rows import RowBuffer
from edgespec.errors import CapabilityError


class HiddenStates:
    """The hidden states of one context. `most_rows`: limit for a pass that gives them, as it computes all logits.

    `rows`: as an engine's `states_of`.
    """

    rows: ClassVar[StatesOf] = "scored rows"

    def __init__(self, model: Any, context: Any, most_rows: int) -> None:
        self._context, self._most_rows = context, most_rows
        self._width = int(library().llama_model_n_embd(model))
        self.are_wanted = False
        self._num_rows = 0  # of the last pass
        self._gives: bool | None = None  # what the context was told last

    @classmethod
    def instead_of(cls, before: HiddenStates, model: Any, context: Any) -> Self:
        """What takes the place of `before`."""
        library().llama_set_embeddings(context, False)
        found = cls(model, context, before._most_rows)
        found.are_wanted = before.are_wanted
        return found

    def prepare(self, rows: RowBuffer, width: int) -> None:
        """The next pass has these `rows`, the first `width` of them the caller's."""
        gives = self.are_wanted and rows.struct.n_tokens <= self._most_rows
        self._num_rows = width if gives else 0
        if gives is not self._gives:
            library().llama_set_embeddings(self._context, gives)
            self._gives = gives
        if gives:
            rows.outputs[: rows.struct.n_tokens] = 1

    def forget(self) -> None:
        """The pass failed."""
        self._num_rows = 0

    def read(self) -> NDArray[np.float32]:
        """[rows, hidden size], a view or a copy. Raises CapabilityError when the last pass gave none."""
        if not self._num_rows:
            raise CapabilityError(
                f"the last pass gave no hidden states: call give_hidden_states(True) before a pass of at most "
                f"{self._most_rows} rows"
            )
        return self._read()

    def _read(self) -> NDArray[np.float32]:
        states = library().llama_get_embeddings(self._context)
        return np.ctypeslib.as_array(states, (self._num_rows, self._width))


class AllStates(HiddenStates):
    """The same without further logits, in passes of any width, for architectures whose layers llama.cpp knows."""

    rows: ClassVar[StatesOf] = "all rows"
    _only_outputs: ClassVar[bool] = False

    def prepare(self, rows: RowBuffer, width: int) -> None:
        self._num_rows, self._placed = (width if self.are_wanted else 0), rows
        extension("set_states")(self._context, self.are_wanted, self._only_outputs)

    def _read(self) -> NDArray[np.float32]:
        return np.ctypeslib.as_array(extension("get_states")(self._context), (self._num_rows, self._width))


class OutputStates(AllStates):
    """The same of rows with logits only, the others 0: enough for a drafter that starts from the last token's."""

    rows = "rows with logits"
    _only_outputs = True

    def _read(self) -> NDArray[np.float32]:
        with_logits = np.flatnonzero(self._placed.outputs[: self._placed.struct.n_tokens])
        found = np.ctypeslib.as_array(extension("get_states")(self._context), (with_logits.size, self._width))
        own = with_logits < self._num_rows
        states = np.zeros((self._num_rows, self._width), np.float32)
        states[with_logits[own]] = found[own]
        return states

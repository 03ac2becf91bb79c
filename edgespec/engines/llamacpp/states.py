"""What a pass gives besides logits: hidden states, which are the input of the model's head, and inputs of its layers.

Logits keep their bits. The functions that give them are exported by llama.cpp outside its stable interface, by their
C++ names. What they do, and which input ends the process, was read in the sources of llama-cpp-python 0.3.36 and tried:
it ends on a layer that its graph does not name, and ARCHITECTURES are those whose graphs name all layers there. A build
without one of the functions gives a CapabilityError; nothing but heads depends on them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import StatesOf
from edgespec.engines.llamacpp.library import library, version
from edgespec.engines.llamacpp.rows import RowBuffer
from edgespec.errors import CapabilityError

ARCHITECTURES = frozenset({"llama", "qwen3", "qwen3moe", "gpt-oss", "gemma4", "minimax-m2", "nanbeige"})
CONTEXT = ctypes.c_void_p
FLOATS = ctypes.POINTER(ctypes.c_float)
# name -> (as GCC and Clang spell it, as MSVC does, arguments, result)
FUNCTIONS: dict[str, tuple[str, str, list[Any], Any]] = {
    "set_layer_input": (
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
        [CONTEXT, ctypes.c_uint32, ctypes.c_bool],
        None,
    ),
    "get_layer_input": (
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
        [CONTEXT, ctypes.c_uint32],
        FLOATS,
    ),
    "set_states": (
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
        [CONTEXT, ctypes.c_bool, ctypes.c_bool],
        None,
    ),
    "get_states": (
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
        [CONTEXT],
        FLOATS,
    ),
}


@cache
def extension(name: str) -> Any:
    """One of FUNCTIONS. Raises CapabilityError when this build does not export it."""
    itanium, msvc, arguments, result = FUNCTIONS[name]
    exports = library()._lib
    for symbol in (itanium, msvc):
        found = getattr(exports, symbol, None)
        if found is not None:
            found.argtypes, found.restype = arguments, result
            return found
    raise CapabilityError(
        f"llama-cpp-python {version()} does not export {itanium}, which draft heads need: install "
        "llama-cpp-python 0.3.36, or leave the head out"
    )


class HiddenStates:
    """The hidden states of one context, of the rows that `rows` says, as an engine's `states_of`.

    "scored rows": in the way of every model, which computes all logits, so that a pass that gives them has `most_rows`.
    The others: without further logits, in passes of any width, for architectures whose layers llama.cpp knows.
    `layers`: whose inputs come before them, or are all that is given (`has_last`).
    """

    def __init__(self, model: Any, context: Any, architecture: str, most_rows: int) -> None:
        llama = library()
        self._context, self._architecture, self._most_rows = context, architecture, most_rows
        self._width, self._num_layers = int(llama.llama_model_n_embd(model)), int(llama.llama_model_n_layer(model))
        self.rows: StatesOf = "scored rows"
        self.layers: tuple[int, ...] = ()
        self.are_wanted, self.has_last = False, True
        self._num_rows = 0  # of the last pass; 0 when it gave none
        self._placed: RowBuffer | None = None
        self._gives: bool | None = None  # what the context was told last

    def give_of(self, rows: StatesOf) -> None:
        """Give those of other rows from the next pass on."""
        library().llama_set_embeddings(self._context, False)
        self.rows, self._num_rows, self._gives = rows, 0, None

    def read_layers(self, layers: tuple[int, ...]) -> None:
        """Give the inputs of `layers`, counted from 0, too. Raises CapabilityError where these cannot be had."""
        if layers and self._architecture not in ARCHITECTURES:
            raise CapabilityError(
                f"llama.cpp gives no layer inputs of {self._architecture} models, which EAGLE-3 and DFlash heads need; "
                f"it does for: {', '.join(sorted(ARCHITECTURES))}"
            )
        outside = [layer for layer in layers if not 0 <= layer < self._num_layers]
        if outside:
            raise CapabilityError(
                f"the heads read the input of layer {outside[0]}, but this model has 0..{self._num_layers - 1}: give "
                "heads that were made for it"
            )
        for layer in {*self.layers} ^ {*layers}:  # once: the library plans its graph anew when that changes
            extension("set_layer_input")(self._context, layer, layer in layers)
        self.layers, self._num_rows = layers, 0

    def prepare(self, rows: RowBuffer, width: int) -> None:
        """The next pass has these `rows`, the first `width` of them the caller's."""
        gives, self._placed = self.are_wanted, rows
        if self.has_last and self.rows != "scored rows":
            extension("set_states")(self._context, gives, self.rows == "rows with logits")
        elif self.has_last:
            gives = gives and rows.struct.n_tokens <= self._most_rows
            if gives is not self._gives:
                library().llama_set_embeddings(self._context, gives)
                self._gives = gives
            if gives:
                rows.outputs[: rows.struct.n_tokens] = 1
        self._num_rows = width if gives else 0

    def forget(self) -> None:
        """The pass failed."""
        self._num_rows = 0

    def read(self) -> NDArray[np.float32]:
        """[rows, feature size], a view or a copy. Raises CapabilityError when the last pass gave none."""
        if not self._num_rows or self._placed is None:
            raise CapabilityError(
                f"the last pass gave no hidden states: call give_hidden_states(True) before a pass of at most "
                f"{self._most_rows} rows"
            )
        found = [self._input_of(layer) for layer in self.layers]
        if self.has_last:
            found.append(self._last(self._placed))
        return np.concatenate(found, axis=1) if self.layers else found[0]

    def _input_of(self, layer: int) -> NDArray[np.float32]:
        pointer = extension("get_layer_input")(self._context, layer)
        return np.ctypeslib.as_array(pointer, (self._num_rows, self._width))

    def _last(self, placed: RowBuffer) -> NDArray[np.float32]:
        get = library().llama_get_embeddings if self.rows == "scored rows" else extension("get_states")
        if self.rows != "rows with logits":
            return np.ctypeslib.as_array(get(self._context), (self._num_rows, self._width))
        with_logits = np.flatnonzero(placed.outputs[: placed.struct.n_tokens])
        found = np.ctypeslib.as_array(get(self._context), (with_logits.size, self._width))
        own = with_logits < self._num_rows
        states = np.zeros((self._num_rows, self._width), np.float32)
        states[with_logits[own]] = found[own]
        return states

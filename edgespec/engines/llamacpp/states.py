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
    """

    def __init__(self, model: Any, context: Any, most_rows: int) -> None:
        self._context, self._most_rows = context, most_rows
        self._width = int(library().llama_model_n_embd(model))
        self.rows: StatesOf = "scored rows"
        self.are_wanted = False
        self._num_rows = 0  # of the last pass
        self._placed: RowBuffer | None = None
        self._gives: bool | None = None  # what the context was told last

    def give_of(self, rows: StatesOf) -> None:
        """Give those of other rows from the next pass on."""
        library().llama_set_embeddings(self._context, False)
        self.rows, self._num_rows, self._gives = rows, 0, None

    def prepare(self, rows: RowBuffer, width: int) -> None:
        """The next pass has these `rows`, the first `width` of them the caller's."""
        gives, self._placed = self.are_wanted, rows
        if self.rows != "scored rows":
            extension("set_states")(self._context, gives, self.rows == "rows with logits")
        else:
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
        """[rows, hidden size], a view or a copy. Raises CapabilityError when the last pass gave none."""
        if not self._num_rows or self._placed is None:
            raise CapabilityError(
                f"the last pass gave no hidden states: call give_hidden_states(True) before a pass of at most "
                f"{self._most_rows} rows"
            )
        get = library().llama_get_embeddings if self.rows == "scored rows" else extension("get_states")
        if self.rows != "rows with logits":
            return np.ctypeslib.as_array(get(self._context), (self._num_rows, self._width))
        with_logits = np.flatnonzero(self._placed.outputs[: self._placed.struct.n_tokens])
        found = np.ctypeslib.as_array(get(self._context), (with_logits.size, self._width))
        own = with_logits < self._num_rows
        states = np.zeros((self._num_rows, self._width), np.float32)
        states[with_logits[own]] = found[own]
        return states


class LayerInputs:
    """The inputs of chosen layers in the last pass of one context."""

    def __init__(self, model: Any, context: Any) -> None:
        llama = library()
        self._context = context
        self._width = int(llama.llama_model_n_embd(model))
        self._num_layers = int(llama.llama_model_n_layer(model))
        self._layers: tuple[int, ...] = ()
        self.num_rows = 0  # of the last pass; 0 when it gave none

    def ask(self, layers: tuple[int, ...], architecture: str) -> None:
        """Keep the inputs of `layers`, counted from 0, from the next pass on; no layers: stop doing so.

        Raises CapabilityError for a layer, an `architecture` or a build that does not give them.
        """
        if layers and architecture not in ARCHITECTURES:
            raise CapabilityError(
                f"llama.cpp gives no layer inputs of {architecture} models, which EAGLE-3 and DFlash heads need; it "
                f"does for: {', '.join(sorted(ARCHITECTURES))}"
            )
        outside = [layer for layer in layers if not 0 <= layer < self._num_layers]
        if outside:
            raise CapabilityError(
                f"the heads read the input of layer {outside[0]}, but this model has 0..{self._num_layers - 1}: give "
                "heads that were made for it"
            )
        for layer in {*self._layers} ^ {*layers}:
            extension("set_layer_input")(self._context, layer, layer in layers)
        self._layers = layers
        self.num_rows = 0

    def passed(self, num_rows: int) -> None:
        """A pass has ended whose first `num_rows` rows are the caller's."""
        self.num_rows = num_rows if self._layers else 0

    def read(self) -> NDArray[np.float32]:
        """A copy [rows of the last pass, layers * width]. Raises CapabilityError when it gave none."""
        if not self.num_rows:
            raise CapabilityError("the last pass gave no layer inputs: call give_layer_inputs before it")
        get = extension("get_layer_input")
        shape = (self.num_rows, self._width)
        return np.concatenate([np.ctypeslib.as_array(get(self._context, layer), shape) for layer in self._layers], 1)

"""Inputs of some of a model's layers, for EAGLE-3 and DFlash heads: llama.cpp keeps them beside the logits of a pass.

Logits keep their bits. llama.cpp ends the process on a layer that its graph does not name; ARCHITECTURES are
those whose graphs name all layers in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.llamacpp.extensions import extension
from edgespec.engines.llamacpp.library import library
from edgespec.errors import CapabilityError

ARCHITECTURES = frozenset({"llama", "qwen3", "qwen3moe", "gpt-oss", "gemma4", "minimax-m2", "nanbeige"})


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

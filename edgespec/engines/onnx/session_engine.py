"""What the engines on sessions of ONNX Runtime have in common: cancelling, hidden states."""

from __future__ import annotations

from typing import Any

from edgespec.engines.booked import BookedEngine
from edgespec.engines.model_files import HeldFiles
from edgespec.errors import CapabilityError


class SessionEngine(BookedEngine):
    """One ONNX model. Logits stay valid until the next `forward`. `_options`: of all its passes."""

    states_of = "all rows"  # they are taken before the head keeps those whose logits are wanted
    _options: Any
    _held: HeldFiles
    _has_hidden: bool

    def give_hidden_states(self, wanted: bool) -> None:
        """As in the base class; a graph that has them as an output computes them in every pass, at no cost."""
        self._require_open()
        if wanted and not self._has_hidden:
            raise CapabilityError("this model was loaded without hidden states: load it with hidden_states=True")

    @property
    def _is_cancelled(self) -> bool:
        return bool(self._options.terminate)

    @_is_cancelled.setter
    def _is_cancelled(self, wanted: bool) -> None:
        self._options.terminate = wanted

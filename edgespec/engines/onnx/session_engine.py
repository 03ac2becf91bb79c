"""What the engines on sessions of ONNX Runtime have in common: cancelling, threads, hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.engines.base import check_threads
from edgespec.engines.booked import BookedEngine
from edgespec.engines.model_files import HeldFiles
from edgespec.engines.onnx.sessions import Sessions
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.errors import CapabilityError


class SessionEngine(BookedEngine):
    """One ONNX model. Logits stay valid until the next `forward`. `_options`: of all its passes."""

    vocabulary: TokenizerFile
    states_of = "all rows"  # they are taken before the head keeps those whose logits are wanted
    _options: Any
    _sessions: Sequence[Sessions]
    _held: HeldFiles
    _has_hidden: bool

    def give_hidden_states(self, wanted: bool) -> None:
        """As in the base class; a graph that has them as an output computes them in every pass, at no cost."""
        self._require_open()
        if wanted and not self._has_hidden:
            raise CapabilityError("this model was loaded without hidden states: load it with hidden_states=True")

    def set_threads(self, threads: int) -> bool:
        """With fewer, the same threads sleep instead of spinning (see `Sessions`); the bits are the same."""
        self._require_open()
        check_threads(threads, self.facts)
        if self.facts.device != "cpu" or self.facts.threads == 1:
            return False
        for sessions in self._sessions:
            sessions.want(spins=threads == self.facts.threads)
        return True

    def thread_steps(self) -> tuple[int, ...]:
        return self.facts.threads, 1

    @property
    def is_settled(self) -> bool:
        return all(sessions.is_settled for sessions in self._sessions)

    @property
    def _is_cancelled(self) -> bool:
        return bool(self._options.terminate)

    @_is_cancelled.setter
    def _is_cancelled(self, wanted: bool) -> None:
        self._options.terminate = wanted

    def _free(self) -> None:
        self._held.close()
        for sessions in self._sessions:
            sessions.close()

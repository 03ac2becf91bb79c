"""What an ONNX engine needs of its KV caches; there are two ways to lay them out, see `separate` and `packed`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.rows import SequenceRows
from edgespec.types import Batch, Logits


class Caches(ABC):
    """The caches of all sequences. Lengths are the engine's business: it says how long a sequence is."""

    can_tree: bool

    @abstractmethod
    def run(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        """Score a checked batch; logits of the wanted rows in their order. Chains are in the cache afterwards."""

    @abstractmethod
    def keep(self, sequence: int, part: SequenceRows, path: list[int]) -> None:
        """Of the last rows of a sequence keep those of `path`."""

    @abstractmethod
    def truncate(self, sequence: int, to_length: int) -> None:
        """Forget all tokens from position `to_length` on, and an unsettled tree."""

    @abstractmethod
    def fork(self, source: int, destination: int, length: int) -> None:
        """Let `destination` hold the first `length` tokens of `source`."""

    @abstractmethod
    def save(self, sequence: int, length: int) -> bytes:
        """Tokens and keys and values of a sequence."""

    @abstractmethod
    def load(self, sequence: int, payload: bytes, length: int) -> None:
        """Restore what `save` gave."""

    @abstractmethod
    def hidden(self, width: int) -> NDArray[np.float32]:
        """Last hidden states [width, hidden size] of the last batch, if that was of one sequence."""

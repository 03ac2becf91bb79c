"""The contract of a feature head: a small model that continues a text from what the target's layers made of it.

It reads pairs: pair P is the state of the text up to token P, and token P + 1. From features of the target's own passes
`encode` makes states; where the target has not been yet, the head's own last state stands for the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.types import Closing, Logits, TokenIds

States = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """`context_length`: most pairs in its cache; `layers`: those of the target whose inputs it reads, side by side
    `feature_width` wide; `width` of its states; `end_ids`, tokens behind which nothing is drafted; bytes in all."""

    context_length: int
    layers: tuple[int, ...]
    feature_width: int
    width: int
    end_ids: frozenset[int]
    num_bytes: int


class FeatureHead(Closing, ABC):
    """One head with a cache of pairs `start`..`end`, one generation at a time. Not thread safe, `cancel` excepted."""

    facts: HeadFacts
    start: int
    end: int

    @abstractmethod
    def encode(self, features: States) -> States:
        """States [n, width] of target features [n, feature_width]. Raises BatchError, Cancelled, EngineError."""

    @abstractmethod
    def decode(self, token_ids: TokenIds, states: States) -> tuple[Logits, States]:
        """Append pairs of `states` [n, width] and the tokens behind them [n]; (logits [vocabulary], state [width]).

        Both are of the last pair, views that the next call changes. Logits of tokens it cannot propose are -inf.
        Raises BatchError, ContextFull, Cancelled and EngineError; the cache is then as before the call.
        """

    @abstractmethod
    def rollback(self, to_end: int) -> None:
        """Drop the pairs from `to_end` on. Raises BatchError outside start..end."""

    @abstractmethod
    def drop_before(self, start: int) -> None:
        """Drop the oldest pairs, those before `start`. Raises BatchError outside start..end."""

    @abstractmethod
    def restart(self, position: int) -> None:
        """Drop everything; the next pair stands at `position`."""

    def set_threads(self, threads: int) -> None:
        """Let passes from now on use so many threads, at least 1, where that can be changed."""

    @abstractmethod
    def cancel(self) -> None:
        """End the running pass, or the next one, with Cancelled. May be called from any thread."""

    @abstractmethod
    def clear_cancel(self) -> None:
        """Forget a `cancel` that no pass has met yet."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; closing twice is allowed."""

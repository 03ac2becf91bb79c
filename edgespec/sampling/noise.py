"""Counter-based random numbers: every draw is a pure function of (seed, stream, position, token id).

There is no state, so the order of draws does not matter: drafter and target see the same noise at the same position,
a rejected draft consumes nothing, and a single token can be sampled again. The mixer is the finaliser of splitmix64
(Steele, Lea & Flood, OOPSLA 2014), applied once per counter word.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from edgespec.types import TokenIds

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF
_SHIFTS = np.array([30, 27, 31, 11], np.uint64)
_FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB, _GOLDEN], np.uint64)


class Stream(IntEnum):
    """Independent streams of random numbers."""

    TARGET = 0  # the target's token at a position; a coupled drafter reads the same stream
    DRAFT = 1  # drafts sampled independently of the target, for the rejection rule
    ACCEPT = 2  # accept or reject
    RESIDUAL = 3  # the token after a rejection, or the bonus token


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Noise:
    """Noise of one seed (any integer; its low 64 bits are used)."""

    def __init__(self, seed: int) -> None:
        self._key = _mix(seed & _MASK)

    def _counter(self, stream: Stream, position: int, index: int) -> int:
        counter = _mix(_mix(self._key ^ (int(stream) * _GOLDEN & _MASK)) ^ position)
        return _mix(counter ^ _mix(index)) if index else counter

    def uniform(self, stream: Stream, position: int, index: int = 0) -> float:
        """One number in (0, 1); a different `index` gives an independent draw at the same position."""
        return ((_mix(self._counter(stream, position, index)) >> 11) + 0.5) * 2.0**-53

    def exponential(self, stream: Stream, position: int, token_ids: TokenIds, index: int = 0) -> NDArray[np.float64]:
        """Exp(1) draws [m], one per token id [m], determined by stream, position, index and id."""
        x = token_ids.astype(np.uint64)
        x *= _FACTORS[2]
        x += np.uint64(self._counter(stream, position, index))
        x ^= x >> _SHIFTS[0]
        x *= _FACTORS[0]
        x ^= x >> _SHIFTS[1]
        x *= _FACTORS[1]
        x ^= x >> _SHIFTS[2]
        uniform = ((x >> _SHIFTS[3]).astype(np.float64) + 0.5) * 2.0**-53
        return np.asarray(-np.log(uniform))

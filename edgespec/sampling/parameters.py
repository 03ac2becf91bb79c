"""The sampling settings of one generation, and their limits."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.config import RANDOM_SEED
from edgespec.config.checks import refuses_unknown
from edgespec.errors import SamplingError, shown

MAX_TEMPERATURE = 100.0
_MOST_BIAS = 1e30  # finite in float32 even after a logit is added
_MOST_WHOLE = 2**31 - 1
_LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
_WHOLE_LIMITS: dict[str, tuple[int, int]] = {
    "top_k": (-1, _MOST_WHOLE),
    "penalty_window": (-1, _MOST_WHOLE),
    "seed": (-(2**63), 2**64 - 1),
}
# What other programs mean by a negative number.
_HINTS = {"top_k": "0 or -1 keeps all", "penalty_window": "-1 counts all of the context"}


@refuses_unknown(SamplingError)
@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of one generation. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 disable these filters.

    Penalties as in llama.cpp, over the last `penalty_window` tokens; -1: all of the context. `logit_bias`: token id to
    added logit; -inf forbids the token. `seed` None, or -1 as in llama.cpp: a fresh one for each generation, which its
    result tells.
    Raises SamplingError for a value that is out of range, not finite or of another type (bool is not a number).
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.seed, int) and self.seed == RANDOM_SEED:
            object.__setattr__(self, "seed", None)
        for name, (low, high) in _LIMITS.items():
            object.__setattr__(self, name, _number(name, getattr(self, name), low, high))
        for name, (least, most) in _WHOLE_LIMITS.items():
            if name != "seed" or self.seed is not None:
                object.__setattr__(self, name, _whole_number(name, getattr(self, name), least, most))
        object.__setattr__(self, "top_k", max(self.top_k, 0))  # -1 is how llama.cpp and vLLM keep all
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def seeded(self) -> Sampling:
        """These settings with a seed: a fresh one if `seed` is None."""
        return self if self.seed is not None else replace(self, seed=fresh_seed())

    @property
    def uses_history(self) -> bool:
        """Whether a penalty is in effect, which depends on the previous tokens."""
        return self.penalty_window != 0 and (
            self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )


def fresh_seed() -> int:
    """A random seed of 32 bits, which fits any JSON reader."""
    return secrets.randbits(32)


def _number(name: str, value: object, low: float, high: float) -> float:
    """`value` as a Python number. Raises SamplingError."""
    found = value.item() if isinstance(value, np.floating | np.integer) else value
    if isinstance(found, bool) or not isinstance(found, int | float) or not low <= found <= high:  # false for NaN
        raise SamplingError(f"{name} must be a number from {low:g} to {high:g}, got {shown(value)}")
    return found


def _whole_number(name: str, value: object, low: int, high: int) -> int:
    """`value` as a Python int. Raises SamplingError."""
    found = value.item() if isinstance(value, np.integer) else value
    if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
        hint = f"; {_HINTS[name]}" if name in _HINTS else ""
        raise SamplingError(f"{name} must be a whole number from {low} to {high}, got {shown(value)}{hint}")
    return found


def _checked_bias(given: object) -> dict[int, float]:
    """A checked copy: later changes by the caller have no effect. Raises SamplingError."""
    if not isinstance(given, Mapping):
        raise SamplingError(f"logit_bias must map token ids to numbers, got {shown(given)}")
    found: dict[int, float] = {}
    for token_id, bias in given.items():
        known = _whole_number("a token id in logit_bias", token_id, 0, _MOST_WHOLE)
        is_ban = isinstance(bias, float | np.floating) and bias == -math.inf
        name = f"logit_bias of token {known} (-inf forbids it)"
        found[known] = -math.inf if is_ban else _number(name, bias, -_MOST_BIAS, _MOST_BIAS)
    return found

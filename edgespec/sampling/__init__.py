"""Sampling: settings, and the sampler that turns logits into distributions and tokens."""

from __future__ import annotations

from edgespec.config import MAX_TEMPERATURE, Sampling
from edgespec.sampling.sampler import NoTokenLeft, Sampler
from edgespec.sampling.top import top_ids

__all__ = [
    "MAX_TEMPERATURE",
    "NoTokenLeft",
    "Sampler",
    "Sampling",
    "top_ids",
]

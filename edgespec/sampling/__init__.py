"""Sampling: the sampler that turns logits into distributions and tokens."""

from __future__ import annotations

from edgespec.sampling.sampler import NoTokenLeft, Sampler, top_ids

__all__ = ["NoTokenLeft", "Sampler", "top_ids"]
